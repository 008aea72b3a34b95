"""The pytest plugin: options, selection, parameters, the five results, and a watchdog over all of it.

Owns the meeting of pytest's outcomes with the suite's. Opt in with ``-p devipc.conformance.plugin``; tests that are no
cases are left alone.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Generator
from typing import Any

import pytest

from devipc.conformance import fixtures
from devipc.conformance.catalogue import ATTRIBUTE, Case
from devipc.conformance.fixtures import BROKEN_OFF
from devipc.conformance.results import Outcome, Result, is_backends_fault
from devipc.conformance.staging import Unavailable
from devipc.conformance.suite import Suite
from devipc.errors import DevIPCError
from devipc.types import HandleKind, Strategy

__all__ = ["Prepared", "case_of", "pytest_addoption", "pytest_configure"]

_HUNG_STATUS = 70
_LETTERS = {Result.FAIL: "F", Result.ERROR: "E", Result.SKIP: "s", Result.DEVIATION: "d"}


class Prepared:
    """A plugin that hands over a run that was made already; see :func:`devipc.conformance.running.run`."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("devipc", "devipc conformance")
    for name, what in (
        ("backend", "name of an installed backend, or MODULE:FACTORY"),
        ("profile", "MODULE:OBJECT of a BackendProfile; the default is made from the backend's answers"),
        ("device", "UUID or ordinal; the first device when left out"),
        ("results", "file for the results, JSON"),
        ("only", "ids or areas, separated by commas: MEM-011,SYNC"),
    ):
        group.addoption(f"--devipc-{name}", dest=f"devipc_{name}", default="", help=what)
    group.addoption("--devipc-deadline", dest="devipc_deadline", type=float, help="limit of every wait in seconds")
    for name, what in (
        ("required", "a skip that the profile does not list is a failure"),
        ("simulated", "the driver is no real one; the results say so"),
    ):
        group.addoption(f"--devipc-{name}", dest=f"devipc_{name}", action="store_true", help=what)
    group.addoption("--devipc-large", dest="devipc_large", action="store_true", help="run cases that need gigabytes")
    group.addoption(
        "--devipc-exclusive", dest="devipc_exclusive", action="store_true", help="nobody else uses the device"
    )


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Open the backend, or end the run with the reason why not."""
    if config.getoption("help"):
        return
    ready = [plugin.suite for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, Prepared)]
    try:
        suite = ready[0] if ready else Suite.of(config)
    except DevIPCError as error:
        raise pytest.UsageError(str(error)) from error
    config.devipc_suite = suite  # type: ignore[attr-defined]
    config.pluginmanager.register(fixtures, "devipc-conformance-fixtures")
    config.pluginmanager.register(_Run(suite), "devipc-conformance-run")
    config.add_cleanup(suite.close)


def case_of(item: object) -> Case | None:
    """Return the case of a test, or None when it is none."""
    found = getattr(getattr(item, "function", None), ATTRIBUTE, None)
    return found if isinstance(found, Case) else None


class _Run:
    """The hooks of one run."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._stderr = os.dup(2)  # what pytest captures later is lost when the process is ended
        self._limit_s = (600 if suite.large else 10) + 10 * suite.profile.deadline_s

    # --- which cases -------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give every case its kinds and strategies."""
        if case_of(metafunc) is None:
            return
        if "kind" in metafunc.fixturenames:
            kinds: list[HandleKind | None] = [*self._suite.kinds()] or [None]
            ids = ["none" if kind is None else kind.value for kind in kinds]
            metafunc.parametrize("kind", kinds, ids=ids, indirect=True)
        if "strategy" in metafunc.fixturenames:
            metafunc.parametrize("strategy", list(Strategy), ids=[one.value for one in Strategy], indirect=True)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep what was asked for, and of that the share of this process."""
        number, shares = self._suite.share
        if not self._suite.only and shares == 1:
            return
        wanted = [item for item in items if self._is_asked_for(item)]
        kept = wanted[number - 1 :: shares]
        dropped = [item for item in items if item not in set(kept)]
        items[:] = kept
        config.hook.pytest_deselected(items=dropped)

    def _is_asked_for(self, item: pytest.Item) -> bool:
        known, only = case_of(item), set(self._suite.only)
        return not only or (known is not None and bool({known.id, known.id.partition("-")[0]} & only))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what was not asked for."""
        known = case_of(item)
        if known is not None and known.large and not self._suite.large:
            pytest.skip("needs gigabytes; ask for it with --devipc-large")

    # --- what became of them -----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn pytest's outcome into one of the five."""
        report = yield
        known = case_of(item)
        if known is None:
            return report
        outcome = self._judge(known, call.excinfo)
        item.stash[BROKEN_OFF] = item.stash.get(BROKEN_OFF, False) or outcome.result is not Result.PASS
        self._suite.recorder.add(item.nodeid, known, _parameters(item), outcome, report.duration)
        report.devipc_result = outcome.result  # type: ignore[attr-defined]
        if outcome.result is Result.DEVIATION:
            report.outcome, report.wasxfail = "skipped", outcome.reason
        elif outcome.result is Result.SKIP:
            report.outcome = "skipped"
            if not isinstance(report.longrepr, tuple):
                report.longrepr = (str(item.path), 0, f"Skipped: {outcome.reason}")
        elif outcome.result in (Result.FAIL, Result.ERROR):
            report.outcome = "failed"
            if report.longrepr is None or isinstance(report.longrepr, tuple):
                report.longrepr = outcome.reason
            report.sections.insert(0, ("devipc", f"{known.id}: {known.demand}\n{known.clause}"))
        return report

    def _judge(self, known: Case, excinfo: pytest.ExceptionInfo[BaseException] | None) -> Outcome:
        if excinfo is None:
            return Outcome(Result.PASS)
        return self._judge_error(known, excinfo.value)

    def _judge_error(self, known: Case, error: BaseException) -> Outcome:
        if isinstance(error, BaseExceptionGroup):  # several fixtures failed while a case was ended
            outcomes = [self._judge_error(known, one) for one in error.exceptions]
            reason = "; ".join(dict.fromkeys(outcome.reason for outcome in outcomes))
            return Outcome(max((outcome.result for outcome in outcomes), key=lambda result: result.rank), reason)
        text = "\n".join([str(error).strip() or type(error).__name__, *getattr(error, "__notes__", ())])
        if isinstance(error, pytest.skip.Exception | Unavailable):
            return self._judge_skip(known, text)
        if isinstance(error, pytest.fail.Exception) or is_backends_fault(error, self._suite.package):
            if not isinstance(error, AssertionError | pytest.fail.Exception):
                text = f"{type(error).__name__}: {text}"
            return self._judge_failure(known, text)
        return Outcome(Result.ERROR, f"{type(error).__name__}: {text}")

    def _judge_skip(self, known: Case, reason: str) -> Outcome:
        profile = self._suite.profile
        expected = (
            profile.skips_allowed or known.id in profile.expected_skips or (known.large and not self._suite.large)
        )
        if expected:
            return Outcome(Result.SKIP, reason)
        return self._judge_failure(known, f"skipped, and the profile does not list that: {reason}")

    def _judge_failure(self, known: Case, reason: str) -> Outcome:
        deviation = self._suite.profile.deviation(known.id)
        if deviation is None:
            return Outcome(Result.FAIL, reason)
        return Outcome(Result.DEVIATION, f"{deviation.reason} ({deviation.link}); seen: {reason}")

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Show the five results apart."""
        result = getattr(report, "devipc_result", None)
        if result in (Result.FAIL, Result.ERROR):
            return {Result.FAIL: "failed", Result.ERROR: "error"}[result], _LETTERS[result], result.value.upper()
        if result is Result.DEVIATION:
            return "deviation", "d", "DEVIATION"
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how it went, and which deviations did not show."""
        counts = ", ".join(f"{count} {result.value}" for result, count in self._suite.recorder.counts().items())
        worst = self._suite.recorder.by_case()
        terminalreporter.write_line(f"devipc conformance of {self._suite.backend.name}: {len(worst)} cases; {counts}")
        for known in self._suite.profile.deviations:
            if worst.get(known.case) is Result.PASS:
                terminalreporter.write_line(f"{known.case} is declared as a deviation and passed: {known.link}")

    # --- nobody hangs ------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """End this process when a case is stuck in a driver, with the results so far."""
        known = case_of(item)
        if known is None:
            return (yield)
        timer = threading.Timer(self._limit_s, self._give_up, (item.nodeid, known, _parameters(item)))
        timer.daemon = True
        timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()
            timer.join()

    def _give_up(self, key: str, known: Case, parameters: str) -> None:
        reason = f"this process was still stuck after {self._limit_s:g} s"
        self._suite.recorder.add(key, known, parameters, Outcome(Result.FAIL, reason), self._limit_s)
        try:
            os.write(self._stderr, f"{known.id}: {reason}\n".encode())
            faulthandler.dump_traceback(file=self._stderr)
            self._suite.stuck()
        except Exception as error:  # a full disk, as a rule: the process is stuck all the same
            os.write(self._stderr, f"the results are lost: {error}\n".encode())
        finally:
            os._exit(_HUNG_STATUS)


def _parameters(item: pytest.Item) -> str:
    _, _, parameters = item.name.partition("[")
    return parameters.rstrip("]")
