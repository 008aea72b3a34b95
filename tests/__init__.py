"""Tests of the core, by area; a backend's own tests live beside that backend."""
