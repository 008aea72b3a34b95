"""The built-in backend on plain host memory: works on any Linux machine, and is the oracle for all other backends.

Written against :mod:`devipc.spi` only, like any vendor's package.
"""
