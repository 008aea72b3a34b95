"""A run of the suite as one call: the profile is made, pytest is run in this process, and the results come back.

Owns the way from names to a finished run, for programs such as the command line. It prints nothing of its own.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from devipc.conformance import plugin
from devipc.conformance.catalogue import cases
from devipc.conformance.plugin import Prepared
from devipc.conformance.profile import BackendProfile, find_profile
from devipc.conformance.results import SuiteError, check_writable
from devipc.conformance.suite import Suite
from devipc.errors import UsageError

__all__ = ["areas", "profile_of", "run"]


def areas() -> tuple[str, ...]:
    """Return the areas of the catalogue: the part of each id before the number."""
    return tuple(dict.fromkeys(case.id.partition("-")[0] for case in cases()))


def profile_of(*, backend: str, profile: str, device: str, required: bool, simulated: bool) -> BackendProfile:
    """Return the profile ``module:object``, or the default one of ``backend``, with what was asked for besides.

    Raises
    ------
    UsageError
        When neither is named or the profile cannot be loaded.
    """
    if not (backend or profile):
        raise UsageError("no backend was named", remedy="pass --backend NAME, or --profile MODULE:NAME")
    found = find_profile(profile) if profile else BackendProfile(backend=backend)
    changes: dict[str, Any] = {"backend": backend, "device": device, "simulated": simulated}
    found = dataclasses.replace(found, **{name: value for name, value in changes.items() if value})
    return dataclasses.replace(found, skips_allowed=False) if required else found


def run(
    profile: BackendProfile,
    *,
    only: Sequence[str] = (),
    results: Path | None = None,
    junit: Path | None = None,
    large: bool = False,
    share: tuple[int, int] = (1, 1),
    told: Callable[[dict[str, Any]], None] = lambda _document: None,
) -> tuple[bool, dict[str, Any]]:
    """Run the suite in this process; blocks until it is over, and ends this process when a driver is stuck.

    Parameters
    ----------
    profile : BackendProfile
        What is run.
    only : sequence of str
        Ids and areas; everything when empty.
    results, junit : Path, optional
        Where files go: the results as JSON, and what continuous integration reads.
    large : bool
        Run cases that need gigabytes too.
    share : tuple of int
        Which of how many parts is run, the first being 1; see :func:`devipc.conformance.shares.run_shares`.
    told : callable
        Given the results when a driver is stuck, right before this process ends; on a thread of its own.

    Returns
    -------
    tuple of bool and dict
        Whether no case failed or broke, and the results.

    Raises
    ------
    UsageError
        For an id or area that there is not.
    CapabilityError
        When the backend or the device is not there.
    SuiteError
        When the run broke off.
    """
    known = {*areas(), *(case.id for case in cases())}
    if unknown := [name for name in only if name not in known]:
        raise UsageError(f"no case or area {', '.join(unknown)}", remedy="see `devipc conformance list`")
    check_writable(results, junit)
    if share[1] > 1:  # other shares use the device
        profile = dataclasses.replace(profile, exclusive_device=False)
    arguments = ["--pyargs", "devipc.conformance", "-c", os.devnull, "--rootdir", os.getcwd()]
    arguments += ["--noconftest", "-p", "no:cacheprovider", "-q", "--tb=short"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the catalogue was imported before pytest began
    arguments += [f"--junit-xml={junit}"] if junit is not None else []
    with tempfile.TemporaryDirectory(prefix="devipc-conformance-") as folder:
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", folder)

        def stuck(document: dict[str, Any]) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            told(document)

        suite = Suite(profile, large=large, only=tuple(only), results=results, share=share, told=stuck)
        code = pytest.main(arguments, plugins=[plugin, Prepared(suite)])
    sys.stdout.flush()
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    nothing = share[1] > 1 and code == pytest.ExitCode.NO_TESTS_COLLECTED  # there are more shares than cases
    if not nothing and code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SuiteError(f"the run broke off: pytest ended with {pytest.ExitCode(code).name.lower()}")
    return nothing or code == pytest.ExitCode.OK, suite.document()
