"""The daemon's life as its administrator sees it: one on a socket, ready, asked, drained, killed, and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from devipc.channel.link import Link
from devipc.errors import DevIPCError
from devipc.hicache.operations import Event
from devipc.hicache.wire import protocol as p
from tests.hicache.daemon import engine_that_holds_memory
from tests.hicache.daemon.daemons import SCRIPT, TIMEOUT_S, Daemon, RawClient, alive, daemon, run, until
from tests.simulator import build, control


def test_one_daemon_on_a_socket_is_ready_is_asked_and_drains() -> None:
    with daemon() as one:
        ready = one.ready
        assert ready["socket"] == one.path
        assert ready["pid"] == one.process.pid
        assert ready["backend"] == "host"
        assert ready["pinned"] == "yes"
        assert stat.S_IMODE(os.stat(one.path).st_mode) == 0o600
        second = run("serve", "--socket", one.path, "--tier-nbytes", "8MiB", expect=2)
        assert f"process {one.process.pid} already listens" in second.stderr
        assert second.stdout == ""
        status = json.loads(run("status", "--json", "--socket", one.path).stdout)
        assert status["schema"] == "devipc.hicache.status/1"
        assert status["state"] == "running"
        assert status["engine"]["pid"] == ready["engine_pid"]
        text = run("status", "--socket", one.path).stdout
        assert f"running, process {one.process.pid}" in text
        assert run("drain", "--socket", one.path).stdout == "drained\n"
        assert one.wait() == 0
        assert not alive(ready["engine_pid"])
        assert os.listdir(os.path.dirname(one.path)) == [os.path.basename(one.log)]
        assert "nobody listens" in run("status", "--socket", one.path, expect=1).stderr


@pytest.mark.long
def test_who_started_it_is_told_by_descriptor_and_by_the_service_manager(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(TIMEOUT_S)
        reader, writer = os.pipe()
        with daemon(
            options={"ready_fd": writer}, environment={"NOTIFY_SOCKET": str(tmp_path / "notify")}, pass_fds=[writer]
        ) as one:
            os.close(writer)
            with open(reader) as told:
                assert json.loads(told.read()) == one.ready  # to the end of the file: it was closed
            assert b"READY=1" in manager.recv(4096)
            one.end()
            assert manager.recv(4096) == b"STOPPING=1"


def test_sigterm_ends_it_in_good_order() -> None:
    with daemon() as one:
        with_client = RawClient(one.path)
        try:
            assert one.end(signal.SIGTERM) == 0
            assert until(lambda: with_client.link.state.value) == "closed"  # a goodbye, not a death
        finally:
            with_client.close()
        assert not alive(one.ready["engine_pid"])
        assert "Traceback" not in one.said()


@pytest.mark.long
def test_a_daemon_that_was_killed_is_in_nobodys_way() -> None:
    with daemon() as one:
        one.process.kill()
        one.wait()
        until(lambda: not alive(one.ready["engine_pid"]))
        folder = os.path.dirname(one.path)
        assert os.path.basename(one.path) in os.listdir(folder)
        again = Daemon(folder)
        try:
            assert again.status()["state"] == "running"
            assert again.end() == 0
        finally:
            again.close()
        assert not [name for name in os.listdir(folder) if not name.startswith("log-")]


@pytest.mark.long
@pytest.mark.chaos
def test_an_engine_that_is_killed_is_followed_by_another_one() -> None:
    with daemon() as one:
        client = RawClient(one.path)
        try:
            first = one.ready["engine_pid"]
            os.kill(first, signal.SIGKILL)
            until(lambda: client.link.state.value == "closed")
            status = until(lambda: (found := one.status())["state"] == "running" and found)
            assert status["engine"]["pid"] not in (0, first)
            assert status["engine"]["starts"] == 2
            assert "signal 9" in status["engine"]["last_end"]
            assert status["clients"] == []
            again = RawClient(one.path, client=client.client)
            assert again.welcome.epoch == client.welcome.epoch  # the tier, and what is found in it, stayed
            assert again.welcome.engine_instance != client.welcome.engine_instance
            again.close()
        finally:
            client.close()
        assert one.end() == 0


@pytest.mark.long
def test_an_engine_that_stands_still_is_killed() -> None:
    with daemon(options={"stuck_s": 0.7}) as one:
        os.kill(one.ready["engine_pid"], signal.SIGSTOP)
        status = until(lambda: (found := one.status())["engine"]["starts"] == 2 and found)
        assert "no sign of life" in status["engine"]["last_end"]
        assert one.end() == 0


@pytest.mark.long
def test_an_engine_that_stood_still_with_its_daemon_lives_on() -> None:
    """A container is stopped and goes on as a whole, process by process."""
    with daemon(options={"stuck_s": 1.5}) as one:
        pids = (one.ready["engine_pid"], one.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.4)  # the daemon has looked since the engine's last beat
        time.sleep(2.5)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.4)
        time.sleep(1.5)
        assert one.status()["engine"]["starts"] == 1
        os.kill(one.ready["engine_pid"], signal.SIGSTOP)  # and is looked after as before
        until(lambda: one.status()["engine"]["starts"] == 2)
        assert one.end() == 0


@pytest.mark.long
def test_paths_and_settings_that_are_not_safe_are_refused(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "file").write_text("mine")
    small = ("--tier-nbytes", "1MiB")
    for arguments, says in (
        (("--socket", str(open_folder / "s"), *small), "chmod 0700"),
        (("--socket", str(private / "file"), *small), "is no socket"),
        (("--socket", str(private / ("s" * 120)), *small), "at most 107"),
        (("--socket", str(private / "s"), "--max-ops", "none"), "pass an integer"),
        (("--socket", str(private / "s"), "--no-such", "1"), "No such option"),
        (("--socket", str(private / "s"), *small, "--slab-nbytes", "100"), "multiple of 64"),
    ):
        refused = run("serve", *arguments, expect=2)
        assert says in refused.stderr
        assert os.listdir(private) == ["file"]
    assert (private / "file").read_text() == "mine"
    assert os.listdir(open_folder) == []
    unknown = subprocess.run(
        [SCRIPT, "hicache", "serve"],
        env={**os.environ, "DEVIPC_HICACHE_TIER_NBYTE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (unknown.returncode, "did you mean 'tier_nbytes'" in unknown.stderr) == (2, True)


@pytest.mark.long
def test_a_daemon_without_its_device_does_not_start(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    for flags, code, says in (
        (("--backend", "no-such"), 3, "no-such"),
        (("--device", "no-such-device"), None, "no-such-device"),
        (("--tier-nbytes", "900TiB"), 1, "host tier of"),
    ):
        refused = run("serve", "--socket", str(folder / "s"), "--tier-nbytes", "8MiB", *flags, expect=code)
        assert refused.returncode != 0
        assert says in refused.stderr
        assert refused.stdout == ""
        assert "Traceback" not in refused.stderr
    assert os.listdir(folder) == []


def test_a_device_that_shares_no_memory_is_refused_before_there_is_a_client(tmp_path: Path) -> None:
    (tmp_path / "none").touch()
    environment = {engine_that_holds_memory.FOLDER: str(tmp_path)}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, object] = {"engine_module": engine_that_holds_memory.MODULE}
        one = Daemon(folder, options=options, environment=environment, wait=False)
        try:
            assert one.wait() == 3
            assert "CapabilityError: " in one.said()
            assert "this device has no memory interface; remedy: use a backend or device that shares" in one.said()
        finally:
            one.close()


@pytest.mark.long
def test_metrics_are_served_to_this_machine_alone() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with daemon(options={"metrics_port": port}) as one:
        client = RawClient(one.path)
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock:
                sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                with sock.makefile() as answer:
                    text = answer.read()
        finally:
            client.close()
        for line in ("devipc_hicache_up 1.0", "devipc_hicache_clients 1.0", "devipc_hicache_engine_starts_total 1.0"):
            assert line in text
        assert re.search(r"^devipc_hicache_tier_capacity_bytes [1-9]", text, re.M)
        assert 'devipc_hicache_moved_bytes_total{direction="backup"} 0.0' in text
        listening = Path("/proc/net/tcp").read_text()
        assert f"0100007F:{port:04X} 00000000:0000 0A" in listening
        assert f"00000000:{port:04X} 00000000:0000 0A" not in listening
        assert one.end() == 0


@pytest.mark.long
def test_who_connects_for_metrics_and_says_nothing_costs_the_daemon_next_to_nothing() -> None:
    """Any user of this machine may connect there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with daemon(options={"metrics_port": port}) as one:
        tasks = f"/proc/{one.status()['pid']}/task"
        before = len(os.listdir(tasks))
        flood = [socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) for _ in range(60)]
        try:
            for late in flood[20:]:  # hung up on: they are more than a few
                assert late.recv(1) == b""
            assert len(os.listdir(tasks)) <= before + 10
        finally:
            for sock in flood:
                sock.close()

        def served() -> bool:
            with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as sock:
                try:
                    sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                    with sock.makefile() as answer:
                        return "devipc_hicache_up 1.0" in answer.read()
                except ConnectionError:  # the others are not noted as gone yet
                    return False

        until(served)
        assert one.end() == 0


@pytest.mark.long
def test_a_status_is_watched_until_an_interrupt() -> None:
    with daemon() as one:
        watch = subprocess.Popen(
            [SCRIPT, "hicache", "status", "--socket", one.path, "--watch", "--every", "0.1", "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watch.stdout is not None
        try:
            seen = [json.loads(watch.stdout.readline())["uptime_s"] for _ in range(3)]
            assert seen == sorted(seen)
            watch.send_signal(signal.SIGINT)
            assert watch.wait(TIMEOUT_S) == 0
        finally:
            watch.kill()
            watch.wait()
            watch.stdout.close()
        assert one.end() == 0


@pytest.mark.long
def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    starting = Daemon(str(folder), wait=False)
    try:
        until(lambda: os.path.exists(starting.path))  # it holds the path, and starts its engine
        assert starting.end(signal.SIGTERM) == 0
    finally:
        starting.close()
    assert [name for name in os.listdir(folder) if not name.startswith("log-")] == []


@pytest.mark.long
def test_peers_that_never_ask_are_closed_and_others_are_served() -> None:
    with daemon(options={"max_clients": 1}) as one:
        silent = []
        try:
            for _ in range(17):  # as many connections as there may be
                link = Link.connect(one.path, facts={}, timeout_s=TIMEOUT_S)
                link.start()
                silent.append(link)
            with pytest.raises(DevIPCError):
                RawClient(one.path).close()
            began = time.monotonic()
            until(lambda: silent[0].state.value == "closed")
            assert 5 < time.monotonic() - began < 15
            until(lambda: run("status", "--socket", one.path, expect=None).returncode == 0)
        finally:
            for link in silent:
                link.close()
        assert one.end() == 0


@pytest.mark.long
@pytest.mark.simulator
def test_the_supervisor_loads_no_driver() -> None:
    environment = {"DEVIPC_TRIAL_CACHE": ""} | control.environment(build.build("cuda"), control.new_room())
    with daemon(options={"backend": "cuda", "write_policy": "write_back"}, environment=environment) as one:
        client = RawClient(one.path)
        try:
            assert client.welcome.backend == "cuda"
            assert client.welcome.write_policy == "write_back"
            assert client.ask(p.StatusFrame(op=1)).event is Event.COMPLETED
            assert "libcuda" in Path(f"/proc/{one.ready['engine_pid']}/maps").read_text()
            assert "libcuda" not in Path(f"/proc/{one.process.pid}/maps").read_text()
        finally:
            client.close()
        assert one.end() == 0
