"""Tests of the cache application's pure parts."""
