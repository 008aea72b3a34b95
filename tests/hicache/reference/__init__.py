"""Tests of the reference engine: control alone, with a runtime here, and with one in another process."""
