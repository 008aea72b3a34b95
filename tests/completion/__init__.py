"""Tests of fences and of the choice of a completion strategy, on the host backend."""
