"""Every way in which a plugin can be wrong: it is put aside with reason and remedy, and its neighbour works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.registry.site import GOOD, Site

LOAD_BOTH = """
from devipc.errors import PluginError
answer = {"good": load_backend("good").name, "names": backend_names()}
try:
    load_backend("bad")
except PluginError as error:
    answer["error"], answer["code"], answer["remedy"] = error.message, error.code, error.remedy
answer["again"] = load_backend("good") is load_backend("good")
answer["quarantined"] = [[q.name, q.distribution, q.reason, q.remedy] for q in quarantined()]
"""

HOOK = "from devipc.spi import hookimpl\nDEVIPC_CONTRACT = 1\n@hookimpl\ndef devipc_backend():\n    "

BAD = {
    "raises": ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "exits_by_call": ("import sys; sys.exit('bye')", "SystemExit: bye"),
    "odd_base_exception": ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
    "generator_exit": ("raise GeneratorExit", "GeneratorExit"),
    "unprintable": ("class U(Exception):\n  def __str__(self): raise OSError\nraise U", "loading it raised U"),
    "endless_text": ("raise RuntimeError('x' * 10**6)", "RuntimeError: xxx"),
    "syntax": ("def (", "SyntaxError"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "dependency": ("import devipc_needs_this_one", "needs the module 'devipc_needs_this_one', which is not installed"),
    "name": ("from json import nothing_like_it", "ImportError: cannot import name"),
    "library": ("import ctypes; ctypes.CDLL('libdevipc-absent.so.7')", "libdevipc-absent.so.7"),
    "refuses": (
        "from devipc.spi import CapabilityError\nraise CapabilityError('too old', remedy='buy a new one')",
        "too old",
    ),
    "half_made_error": (
        "from devipc.spi import UsageError\nclass E(UsageError):\n  def __init__(self): pass\nraise E",
        "it refused to load: E",
    ),
    "no_contract": (GOOD.format(name="bad", count=1).replace("DEVIPC_CONTRACT = 1", ""), "no DEVIPC_CONTRACT"),
    "newer": (GOOD.format(name="bad", count=1).replace("CONTRACT = 1", "CONTRACT = 2"), "written for contract 2"),
    "true": (GOOD.format(name="bad", count=1).replace("CONTRACT = 1", "CONTRACT = True"), "contract True"),
    "text": (GOOD.format(name="bad", count=1).replace("CONTRACT = 1", "CONTRACT = '1'"), "contract '1'"),
    "no_hook": ("DEVIPC_CONTRACT = 1", "implements no hook"),
    "unmarked_hook": ("DEVIPC_CONTRACT = 1\ndef devipc_backend(): return 1", "implements no hook"),
    "misspelt_hook": (HOOK.replace("devipc_backend", "devipc_bakend") + "return 1", "unknown hook 'devipc_bakend'"),
    "greedy_hook": (HOOK.replace("():", "(path):") + "return 1", "PluginValidationError"),
    "hook_raises": (HOOK + "raise KeyError('k')", "KeyError: 'k'"),
    "hook_exits": (HOOK + "raise SystemExit", "SystemExit"),
    "returns_nothing": (HOOK + "return None", "NoneType, which is no Backend"),
    "returns_text": (HOOK + "return 'bad'", "str, which is no Backend: it lacks name, facts, devices, open_device"),
    "returns_class": (GOOD.format(name="bad", count=1).replace("return Backend(", "return Backend or ("), "the class"),
    "other_name": (GOOD.format(name="else", count=1), "calls itself 'else'"),
    "data_for_methods": (
        HOOK + "return type('B', (), dict(name='bad', facts={}, devices=[], open_device=1))()",
        "facts, devices, open_device cannot be called",
    ),
    "asks_for_itself": ("from devipc import load_backend\nload_backend('bad')", "asks for itself"),
    "lies_about_attributes": (
        "def __getattr__(name):\n    if name.startswith('__'): raise AttributeError(name)\n    raise ValueError(name)",
        "ValueError",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_plugin_is_put_aside_alone(site: Site, case: str) -> None:
    source, expected = BAD[case]
    site.plugin("good", "")
    site.plugin("bad", source)
    answer = site.run(LOAD_BOTH)
    assert answer["good"] == "good"
    assert answer["again"] is True
    assert {"bad", "good"} <= set(answer["names"])
    assert answer["code"] == "quarantined"
    assert expected in answer["error"]
    assert "others: " in answer["error"]
    assert "good" in answer["error"]
    assert answer["remedy"]
    ((name, distribution, reason, remedy),) = answer["quarantined"]
    assert (name, distribution, remedy) == ("bad", "devipc-bad 1.0", answer["remedy"])
    assert expected in reason
    assert len(reason) < 600


def test_an_interrupt_by_the_user_is_not_swallowed(site: Site) -> None:
    site.plugin("good", "")
    site.plugin("bad", "raise KeyboardInterrupt")
    answer = site.run(
        "try:\n    load_backend('bad')\nexcept KeyboardInterrupt:\n"
        "    answer = [load_backend('good').name, quarantined()]"
    )
    assert answer == ["good", []]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("bad = plugin_nowhere", "its own module 'plugin_nowhere' is not there"),
        ("bad = plugin_nowhere.deep", "its own module 'plugin_nowhere' is not there"),
        ("bad = plugin_x:missing", "AttributeError"),
        ("bad = 1 2 3", "raised"),
        ("bad =", "raised"),
    ],
)
def test_an_entry_point_that_leads_nowhere(site: Site, entry: str, expected: str) -> None:
    site.plugin("good", "")
    site.install("devipc-bad", entry, plugin_x="DEVIPC_CONTRACT = 1")
    answer = site.run(LOAD_BOTH)
    assert answer["good"] == "good"
    assert expected in answer["error"]


@pytest.mark.parametrize("text", [b"[devipc.backends]\nno equals sign\n", b"[devipc.backends]\nbad = \xff\xfe\n"])
def test_a_malformed_list_of_entry_points_hides_nobody(site: Site, text: bytes) -> None:
    site.plugin("good", "")
    site.install("devipc-bad", "bad = plugin_bad")
    (site.folder / "devipc_bad-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    answer = site.run(LOAD_BOTH)
    assert answer["good"] == "good"
    assert answer["code"] == "unknown_backend"
    ((name, distribution, reason, remedy),) = answer["quarantined"]
    assert (name, distribution) == ("", "devipc-bad 1.0")
    assert "cannot be read" in reason
    assert "reinstall" in remedy


@pytest.mark.parametrize("metadata", [None, b"", b"\xff\xfe\x00", b"Name: \n"])
def test_broken_metadata_hides_nobody(site: Site, metadata: bytes | None) -> None:
    site.plugin("good", "")
    site.plugin("bad", "raise RuntimeError('really bad')")
    file = site.folder / "devipc_bad-1.0.dist-info" / "METADATA"
    if metadata is None:
        file.unlink()
    else:
        file.write_bytes(metadata)
    answer = site.run(LOAD_BOTH)
    assert answer["good"] == "good"
    assert len(answer["quarantined"]) == 1


def test_a_name_that_two_claim_belongs_to_neither(site: Site) -> None:
    site.plugin("good", "")
    site.plugin("bad", GOOD.format(name="bad", count=1), project="one")
    site.install("two", "bad = plugin_bad", version="2.0")
    answer = site.run(LOAD_BOTH)
    assert answer["good"] == "good"
    assert "bad" not in answer["names"]
    assert "2 entry points claim the name 'bad': one 1.0, two 2.0" in answer["error"]
    assert {entry[1] for entry in answer["quarantined"]} == {"one 1.0", "two 2.0"}


def test_a_name_belongs_to_the_distribution_named_for_it(site: Site) -> None:
    """Else a stranger could switch off a vendor's backend, or the built-in one, by asking for the same name."""
    site.plugin("my_card", "", project="devipc-my-card", count=2)
    site.install("aaa-stranger", "my_card = plugin_bad\nhost = plugin_bad", plugin_bad="raise RuntimeError")
    answer = site.run(
        "answer = [len(load_backend('my_card').devices()), backend_names(), [q.distribution for q in quarantined()]]"
    )
    assert answer[0] == 2
    assert {"host", "my_card"} <= set(answer[1])
    assert answer[2] == ["aaa-stranger 1.0"] * 2


def test_a_folder_earlier_on_the_path_shadows_a_later_one(site: Site, tmp_path: Path) -> None:
    site.plugin("good", "", count=3)
    later = Site(tmp_path / "later")
    later.plugin("good", "raise RuntimeError('the old one')", project="DevIPC.Good")
    answer = site.run(
        f"import sys; sys.path.append({str(later.folder)!r})\n"
        "answer = [len(load_backend('good').devices()), len(quarantined())]"
    )
    assert answer == [3, 0]


@pytest.mark.parametrize("name", ["Upper", "with-dash", "with space", "9th", "x" * 33])
def test_an_odd_name_is_refused(site: Site, name: str) -> None:
    site.install("odd", f"{name} = plugin_x")
    answer = site.run("answer = [backend_names(), [[q.name, q.remedy] for q in quarantined()]]")
    assert name not in answer[0]
    assert answer[1] == [[name, "ask its maker to rename it"]]


def test_a_disabled_backend_is_never_loaded(site: Site, tmp_path: Path) -> None:
    trace = tmp_path / "loaded"
    site.plugin("good", "")
    site.plugin("bad", f"open({str(trace)!r}, 'w')")
    answer = site.run(LOAD_BOTH, DEVIPC_BACKENDS_DISABLE=" bad, absent,,")
    assert answer["good"] == "good"
    assert "bad" not in answer["names"]
    assert "disabled by DEVIPC_BACKENDS_DISABLE" in answer["error"]
    assert "take 'bad' out of DEVIPC_BACKENDS_DISABLE" in answer["remedy"]
    assert not trace.exists()


def test_an_unknown_name_is_answered_with_the_known_ones(site: Site) -> None:
    site.plugin("mycard", "")
    answer = site.run(
        "from devipc.errors import PluginError, UsageError\nanswer = []\n"
        "for name in ('mycrad', 'zzz', '', None, 7):\n"
        "    try: load_backend(name)\n"
        "    except (PluginError, UsageError) as error:\n"
        "        answer.append([type(error).__name__, error.message, error.remedy])"
    )
    assert answer[0] == ["PluginError", "no backend 'mycrad' is installed; installed are: host, mycard", answer[0][2]]
    assert answer[0][2] == "did you mean 'mycard'?"
    assert [entry[0] for entry in answer] == ["PluginError"] * 3 + ["UsageError"] * 2


def test_nothing_is_loaded_before_it_is_asked_for(site: Site) -> None:
    """Neither pluggy nor metadata by the import, and no plugin by the list of names."""
    site.plugin("good", "")
    site.plugin("bad", "raise RuntimeError")
    answer = site.run(
        "import sys\nwatched = ('pluggy', 'importlib.metadata', 'subprocess', 'plugin_good', 'plugin_bad')\n"
        "answer = [[name for name in watched if name in sys.modules]]\n"
        "for step in (backend_names, quarantined, lambda: load_backend('good')):\n"
        "    step(); answer.append([name for name in watched if name in sys.modules])"
    )
    assert answer[0] == []
    assert answer[1] == answer[2] == ["importlib.metadata"]
    assert set(answer[3]) >= {"pluggy", "plugin_good"}
    assert "plugin_bad" not in answer[3]


def test_threads_share_one_load(site: Site) -> None:
    slow = "import time, builtins\nbuiltins.loads = getattr(builtins, 'loads', 0) + 1\ntime.sleep(0.2)\n"
    site.plugin("good", slow + GOOD.format(name="good", count=1))
    site.plugin("bad", slow + "raise RuntimeError")
    answer = site.run("""
import builtins, threading
from devipc.errors import PluginError
found, failed = set(), []
def load(name):
    try: found.add(id(load_backend(name)))
    except PluginError as error: failed.append(error)
threads = [threading.Thread(target=load, args=(name,)) for name in ("good", "bad") * 8]
for thread in threads: thread.start()
for thread in threads: thread.join()
answer = [len(found), len(failed), len(set(map(id, failed))), builtins.loads]
""")
    assert answer == [1, 8, 8, 2]


def test_a_plugin_that_hangs_blocks_nobody_else_and_no_forked_child(site: Site) -> None:
    site.plugin("good", "")
    site.plugin("bad", "import builtins; builtins.hanging.set(); builtins.go_on.wait()\nraise RuntimeError")
    answer = site.run("""
import builtins, os, threading
builtins.hanging, builtins.go_on = threading.Event(), threading.Event()
from devipc.errors import PluginError
def load_bad():
    try: load_backend("bad")
    except PluginError: pass
thread = threading.Thread(target=load_bad)
thread.start()
builtins.hanging.wait()
answer = [load_backend("good").name, quarantined()]
child = os.fork()
if child == 0:
    os._exit(0 if backend_names() and load_backend("good").name == "good" else 1)
answer.append(os.waitpid(child, 0)[1])
builtins.go_on.set()
thread.join()
answer.append(len(quarantined()))
""")
    assert answer == ["good", [], 0, 1]
