"""The capability probe: what one machine can do, found out by trying it in two processes.

Owns the checks, the processes in which they run, and the report. It names no vendor and prints nothing.
"""
