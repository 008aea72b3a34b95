"""Tests of the capability probe: honest, lying, crashing and hanging backends, and what is said of them."""
