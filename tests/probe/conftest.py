"""Fixtures of the probe's tests."""

from __future__ import annotations

from tests.probe.tool import site

__all__ = ["site"]
