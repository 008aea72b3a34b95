"""Level Zero backend of devipc. Found through the entry point ``levelzero``; nothing is loaded before."""
