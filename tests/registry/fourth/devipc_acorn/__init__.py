"""Acorn: a device made of memory files and threads: a small, complete backend of devipc."""
