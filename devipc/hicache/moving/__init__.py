"""Putting planned copies on streams: the arena they go to, the threads that submit them, and how fast this machine is.

Owns the order of driver calls; no module here knows an operation, a key or a client.
"""
