"""Acorn: a device made of memory files and threads, and the smallest complete backend of devipc."""
