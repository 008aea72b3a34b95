"""The transfer engine of one device: operations, what each waits for, and the two lanes that copy.

Owns no socket and no process: clients come to it by :class:`~devipc.hicache.engine.session.Session`, and who moves the
bytes is passed to it.
"""

from devipc.hicache.engine.transferengine import Engine, EngineConfig

__all__ = ["Engine", "EngineConfig"]
