"""A small serving engine above the cache: control on one side of a boundary, one accelerator on the other.

Written to be read by those who put devipc under an engine of their own. ``scheduler`` and what it imports hold
identifiers only; everything physical is behind :class:`~devipc.hicache.reference.runtime.RuntimeInterface`.
"""
