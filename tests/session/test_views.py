"""Where the last view of a peer's memory may die: on any thread, inside of any lock."""

from __future__ import annotations

import threading

import pytest

from devipc.errors import HandleError
from devipc.session import Exporter, Importer
from devipc.session.messages import ShareMeta
from devipc.session.remote import check_meta
from tests.session.processes import eventually
from tests.session.worker import TIMEOUT_S


def test_a_view_that_dies_after_close_gives_back_on_another_thread() -> None:
    """A garbage collection can end it while this thread holds the very locks that giving back needs."""
    with Exporter(timeout_s=TIMEOUT_S) as exporter, Importer(exporter.path, timeout_s=TIMEOUT_S) as importer:
        exporter.share("block", exporter.allocate(4096))
        memory = importer.open("block")
        gave_back: list[int] = []
        real = importer.peer.mappings.release

        def release(mapping: object) -> None:
            gave_back.append(threading.get_ident())
            real(mapping)  # type: ignore[arg-type]

        memory._keeper._on_last._release = release  # type: ignore[attr-defined]
        array = memory.to_numpy()
        memory.close()
        assert gave_back == []
        with importer.peer._borrowed._lock:
            del array
        assert eventually(lambda: bool(gave_back))
        assert gave_back != [threading.get_ident()]
        exporter.unshare("block", timeout_s=TIMEOUT_S)


def test_an_element_type_that_only_the_exporter_knows_is_the_handles_fault() -> None:
    with pytest.raises(HandleError, match="float3"):
        check_meta(ShareMeta("float3", (4,), (1,)), 4096)
