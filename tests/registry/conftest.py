"""A site for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.registry.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.with_devipc(tmp_path / "site")
