"""The daemon's status as Prometheus metrics, over HTTP on the loopback address.

Owns their names and the server. Values are read when somebody asks, from the same status that everybody else gets.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from devipc.deadline import no_thread
from devipc.errors import UsageError

__all__ = ["ADDRESS", "MetricsServer", "families"]

ADDRESS = "127.0.0.1"
"""Where metrics are served: nobody else on the network gets them from here."""

_PREFIX = "devipc_hicache_"
_MAX_READERS = 8
_READER_S = 5.0
_log = logging.getLogger("devipc.hicache")


def families(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of one status."""
    engine, tier = status["engine"], status["tier"]
    yield _gauge("up", "1 while an engine serves.", float(status["state"] == "running"))
    yield _gauge("uptime_seconds", "Age of the daemon.", status["uptime_s"])
    yield _counter("engine_starts", "Engine processes started.", engine["starts"])
    yield _gauge("pinned", "1 when the device reaches the host tier itself.", float(engine["pinned"]))
    yield _gauge("clients", "Clients attached.", len(status["clients"]))
    yield _gauge("stalled_operations", "Operations far over their deadline.", len(status["stalled"]))
    yield _gauge("oldest_operation_seconds", "Age of the oldest open operation.", status["oldest_s"])
    operations = GaugeMetricFamily(_PREFIX + "operations", "Open operations.", labels=("kind", "state"))
    for name, count in status["operations"].items():
        operations.add_metric(name.split(":"), count)
    yield operations
    yield _counter("submitted", "Requests taken.", status["submitted"], label="kind")
    yield _counter("answers", "Answers given: progress and statuses.", status["answered"], label="event")
    lanes = status["lanes"]
    moved = {name: lane["moved_nbytes"] for name, lane in lanes.items()}
    yield _counter("moved_bytes", "Bytes copied since the start of the daemon.", moved, label="direction")
    flying = GaugeMetricFamily(_PREFIX + "flying", "Operations on the device's streams.", labels=("direction",))
    for name, lane in lanes.items():
        flying.add_metric((name,), lane["flying"])
    yield flying
    yield _gauge("tier_capacity_bytes", "Host memory of the tier.", tier["capacity_nbytes"])
    yield _gauge("tier_pages", "Pages that can be found.", tier["pages"])
    yield _gauge("tier_holds", "Holds: leases, and restores under way.", tier["holds"])
    events = ("published", "unindexed", "evicted", "flushed", "invalidated", "expired")
    yield _counter("tier_events", "What happened in the tier.", {name: tier[name] for name in events}, label="event")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float | Mapping[str, float], *, label: str = "") -> Metric:
    if not isinstance(value, Mapping):
        return CounterMetricFamily(_PREFIX + name, text, value=value)
    family = CounterMetricFamily(_PREFIX + name, text, labels=(label,))
    for key, count in value.items():
        family.add_metric((key,), count)
    return family


class _Reader(Collector):
    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # so that registering asks for no status

    def collect(self) -> Iterator[Metric]:
        return families(self._status())


class _Request(WSGIRequestHandler):
    timeout = _READER_S  # of a reader that says nothing, or takes nothing

    def log_message(self, format: str, *arguments: Any) -> None:
        _log.debug(format, *arguments)


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each reader, and few of them: whoever is on this machine may connect, also other users."""

    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(_MAX_READERS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had
            self._free.release()
            raise

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a reader of metrics went", exc_info=True)


class MetricsServer:
    """Serves the metrics of ``status()`` on ``port`` of the loopback address until :meth:`close`.

    Raises
    ------
    UsageError
        When the port is not to be had.
    ResourceExhausted
        When no thread is.
    """

    def __init__(self, port: int, status: Callable[[], Mapping[str, Any]]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Reader(status))
        app = make_wsgi_app(registry)
        try:
            self._server = make_server(ADDRESS, port, app, server_class=_Server, handler_class=_Request)
        except OSError as error:
            raise UsageError(
                f"no metrics on port {port} of {ADDRESS} ({error.strerror})",
                code="metrics_port",
                remedy="choose another metrics_port, or 0 for none",
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="devipc-metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._server.server_close()
            raise no_thread("serve metrics", error) from error

    def close(self) -> None:
        """Stop serving, and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
