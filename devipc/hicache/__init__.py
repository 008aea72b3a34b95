"""The parts of the cache application that need no device: pool layouts, copy plans, operation tables, keys, the index.

Owns nothing but the folder. Every module here is pure or works on its own shared memory; none knows a driver, a
socket or a vendor. numpy is needed, and loaded only when one of the modules is.
"""
