"""Backends from real distributions, good and bad, each in a process of its own."""
