"""Backends that crash or hang are an answer, and the default choice says why it passed others over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from devipc.errors import UsageError
from devipc.registry import check_backend_in_child
from tests.registry.site import GOOD, Site

CHECK = """
check = check_backend_in_child("bad", timeout_s={timeout_s})
answer = {{"verdict": check.capability.verdict, "reason": check.capability.reason, "name": check.name,
          "evidence": check.capability.evidence, "remedy": check.capability.remedy, "devices": len(check.devices)}}
import os
answer["fds"] = len(os.listdir("/proc/self/fd"))
check_backend_in_child("bad", timeout_s={timeout_s})
answer["fds_later"] = len(os.listdir("/proc/self/fd"))
answer["children"] = open("/proc/self/task/%d/children" % os.getpid()).read().split()
"""

SEGFAULT = "import ctypes; ctypes.string_at(8)"


def lists(body: str) -> str:
    """Return a plugin whose ``devices()`` is ``body``."""
    return GOOD.format(name="bad", count=1).replace("return self._devices", body)


BAD = {
    "crash_at_import": (SEGFAULT, "broken", "crashed (signal 11)", "Segmentation fault"),
    "crash_in_list": (lists(SEGFAULT), "broken", "crashed (signal 11)", "in devices"),
    "abort": (lists("import os; os.abort()"), "broken", "crashed (signal 6)", "Aborted"),
    "killed": (lists("import os; os.kill(os.getpid(), 9)"), "broken", "crashed (signal 9)", ""),
    "leaves": (lists("import os; os._exit(7)"), "broken", "ended without an answer (exit status 7)", ""),
    "raises": (lists("raise OSError('no node')"), "broken", "listing devices raised OSError: no node", ""),
    "exits": (lists("raise SystemExit(0)"), "broken", "listing devices raised SystemExit: 0", ""),
    "says_no": (lists("raise CapabilityError('no driver', remedy='get one')"), "no", "no driver", ""),
    "none": (lists("return []"), "no", "it lists no device", ""),
    "no_list": (lists("return None"), "broken", "TypeError", ""),
    "other_things": (lists("return ['gpu']"), "broken", "no DeviceInfo", ""),
    "at_import": ("raise RuntimeError('no luck')", "no", "no luck", ""),
}


@pytest.mark.parametrize("case", BAD)
def test_whatever_a_backend_does_is_an_answer(site: Site, case: str) -> None:
    source, verdict, reason, evidence = BAD[case]
    site.plugin("bad", source)
    answer = site.run(CHECK.format(timeout_s=20))
    assert (answer["name"], answer["verdict"], answer["devices"]) == ("bad", verdict, 0)
    assert reason in answer["reason"]
    assert evidence in answer["evidence"]
    assert answer["remedy"]
    assert answer["fds"] == answer["fds_later"]
    assert answer["children"] == []


def test_a_good_backend_lists_its_devices(site: Site) -> None:
    noise = "import sys, os\nprint('x' * 10**6); os.write(2, b'y' * 10**6)\n"
    site.plugin("bad", noise + GOOD.format(name="bad", count=2))
    answer = site.run(CHECK.format(timeout_s=20))
    assert (answer["verdict"], answer["devices"]) == ("yes", 2)
    assert "bad-0 (Tiny), bad-1 (Tiny)" in answer["evidence"]


def test_a_crash_at_exit_comes_too_late_to_matter(site: Site) -> None:
    site.plugin("bad", "import atexit, os; atexit.register(os.abort)\n" + GOOD.format(name="bad", count=1))
    assert site.run(CHECK.format(timeout_s=20))["verdict"] == "yes"


@pytest.mark.parametrize(
    "body",
    [
        "import time; time.sleep(600)",
        "while True: pass",
        # Holds the GIL in C, as a driver call does that was bound without care.
        "import ctypes; ctypes.PyDLL(None).sleep(600)",
    ],
)
def test_a_hanging_backend_is_ended_and_its_stack_shown(site: Site, body: str) -> None:
    site.plugin("bad", lists(body))
    started = time.monotonic()
    answer = site.run(CHECK.format(timeout_s=0.5))
    assert time.monotonic() - started < 10
    assert (answer["verdict"], answer["reason"]) == ("broken", "timed out after 0.5 s")
    assert "in devices" in answer["evidence"]
    assert answer["children"] == []
    assert answer["fds"] == answer["fds_later"]


def test_a_backend_that_cannot_be_asked_to_stop_is_killed_with_its_children(site: Site, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = (
        "import faulthandler, pathlib, subprocess, time; faulthandler.cancel_dump_traceback_later();"
        f" pathlib.Path({str(pid_file)!r}).write_text(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    )
    site.plugin("bad", lists(body))
    answer = site.run(CHECK.format(timeout_s=0.5))
    assert answer["reason"] == "timed out after 0.5 s"
    assert answer["children"] == []
    left = Path(f"/proc/{pid_file.read_text()}/cmdline")
    assert not left.exists() or not left.read_bytes()


def test_no_descriptor_left_is_an_answer(site: Site) -> None:
    site.plugin("bad", "")
    answer = site.run(
        "import os, resource\nbackend_names(); import subprocess, select\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 1,) * 2)\n"
        "check = check_backend_in_child('bad')\nanswer = [check.capability.verdict, check.capability.reason]"
    )
    assert answer == ["untested", "no child could be started (Too many open files)"]


def test_misuse_is_a_usage_error_and_an_unknown_name_is_a_no() -> None:
    with pytest.raises(UsageError, match="timeout"):
        check_backend_in_child("host", timeout_s=0)
    with pytest.raises(UsageError, match="timeout"):
        check_backend_in_child("host", timeout_s=float("nan"))
    with pytest.raises(UsageError, match="str"):
        check_backend_in_child(7)  # type: ignore[arg-type]
    check = check_backend_in_child("no_such_backend")
    assert not check.capability
    assert "no backend 'no_such_backend' is installed" in check.capability.reason


DEFAULT = """
from devipc.errors import PluginError
try:
    choice = default_backend(timeout_s=5)
    answer = [choice.backend.name, list(choice.reasons), [check.name for check in choice.checks]]
except PluginError as error:
    answer = [error.code, error.message]
"""
NO_HOST: Any = {"DEVIPC_BACKENDS_DISABLE": "host"}


def test_the_default_is_the_first_with_a_device_and_all_others_are_explained(site: Site) -> None:
    site.plugin("a_crash", SEGFAULT)
    site.plugin("b_empty", "", count=0)
    site.plugin("c_works", "", count=2)
    site.plugin("d_works", "", count=1)
    name, reasons, names = site.run(DEFAULT, **NO_HOST)
    assert name == "c_works"
    assert names == ["host", "a_crash", "b_empty", "c_works"]
    assert reasons[0].startswith("host: disabled by DEVIPC_BACKENDS_DISABLE; remedy: ")
    assert reasons[1].startswith("a_crash: crashed (signal 11); remedy: ")
    assert reasons[2].startswith("b_empty: it lists no device")
    assert reasons[3].startswith("c_works: lists 2 device(s)")


def test_the_built_in_backend_is_the_last_resort_and_never_a_silent_one(site: Site) -> None:
    site.plugin("zzz", "", count=0)
    name, reasons, names = site.run(DEFAULT)
    assert (name, names) == ("host", ["zzz", "host"])
    assert reasons[0].startswith("zzz: it lists no device; remedy: ")
    assert reasons[1].startswith("host: lists 1 device(s)")


def test_without_any_device_the_default_is_an_error_with_all_reasons(site: Site) -> None:
    site.plugin("bad", lists("raise CapabilityError('no driver')"))
    code, message = site.run(DEFAULT, **NO_HOST)
    assert code == "no_backend"
    assert "bad: no driver" in message
    assert "host: disabled" in message


def test_a_backend_that_works_in_the_child_only_is_passed_over(site: Site) -> None:
    site.plugin("bad", lists("import faulthandler; return self._devices if faulthandler.is_enabled() else []"))
    code, message = site.run(DEFAULT, **NO_HOST)
    assert code == "no_backend"
    assert "bad: it lists no device" in message
