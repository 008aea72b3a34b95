"""The cache daemon's supervisor: everything of it but the engine process, which alone loads a driver.

Owns no name of its own; ``serve`` runs it.
"""
