"""Values, wire format and the small system helpers, one file each."""
