"""The conformance suite: what every backend must do, as cases that run between real processes.

Owns the public names of this floor. Run it with ``pytest --pyargs devipc.conformance -p devipc.conformance.plugin
--devipc-backend NAME``. Only the plugin and the test modules import pytest; peers and this module do not.
"""

from __future__ import annotations

from devipc.conformance.catalogue import Case, case, cases
from devipc.conformance.profile import BackendProfile, Deviation

__all__ = ["BackendProfile", "Case", "Deviation", "case", "cases"]
