"""The built-in backend: memory, streams, words and events between real processes."""
