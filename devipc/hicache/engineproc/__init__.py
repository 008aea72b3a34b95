"""The engine process: one device's driver, the copies of all clients, and their fences.

It knows no key, no tier and no table: a supervisor tells it what to move where. It is killed and started again without
anything of value being lost.
"""
