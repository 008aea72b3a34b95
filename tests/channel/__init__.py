"""Channels, listeners, liveness and links, between real processes."""
