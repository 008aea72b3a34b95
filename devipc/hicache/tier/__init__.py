"""The host tier: which pages are in host memory, who needs them to stay, and how others find them.

Owns places and the index, and touches no page's bytes.
"""
