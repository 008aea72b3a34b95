"""The cache: pages of a device's memory pool kept in host memory, and brought back.

Owns nothing but the folder. :mod:`devipc.hicache.api` is what a scheduler imports. No module here knows a socket or a
vendor. numpy is needed, and loaded only when one of the modules is.
"""
