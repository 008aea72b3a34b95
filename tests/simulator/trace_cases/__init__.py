"""Cases of the trace, by subject."""
