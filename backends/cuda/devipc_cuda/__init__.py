"""CUDA backend of devipc. Found through the entry point ``cuda``; nothing is loaded before a device is asked for."""
