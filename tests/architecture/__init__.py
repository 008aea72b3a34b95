"""The rules of the house, checked on the sources."""
