"""One run of the suite: the profile, the backend, the rig of this process, the peers and the records.

Owns their life from the start of the run to its end. Everything is opened when it is first needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from devipc.capabilities import Verdict
from devipc.completion import create_fence
from devipc.conformance import roles_memory
from devipc.conformance.peers import Peer, Peers
from devipc.conformance.profile import BackendProfile, find_backend, find_profile
from devipc.conformance.results import Recorder, SuiteError, backend_package, write_results
from devipc.conformance.rig import Rig
from devipc.conformance.sharing import shared, shared_by_peer
from devipc.conformance.staging import Unavailable, attempt
from devipc.conformance.worker import open_device
from devipc.errors import CapabilityError, DevIPCError, UsageError
from devipc.types import HandleKind, Mechanism, Strategy

if TYPE_CHECKING:
    import pytest

__all__ = ["Suite", "suite_of"]

PAGE = 4096


class Suite:
    """See the module's text.

    Parameters
    ----------
    profile : BackendProfile
        Whose backend is run.
    large : bool
        Run cases that need gigabytes too.
    only : tuple of str
        Ids or areas to run; everything when empty.
    results : Path, optional
        Where the file goes.
    share : tuple of int
        Which of how many parts of the cases is run, the first being 1.
    told : callable
        Given the results when this process is about to be ended, since a case is stuck.
    """

    def __init__(
        self,
        profile: BackendProfile,
        *,
        large: bool,
        only: tuple[str, ...],
        results: Path | None,
        share: tuple[int, int] = (1, 1),
        told: Callable[[dict[str, Any]], None] = lambda _document: None,
    ) -> None:
        self._told = told
        self.profile = profile
        self.share = share
        self.large = large
        self.only = only
        self.backend = find_backend(profile.backend)
        self.package = backend_package(self.backend)
        self.recorder = Recorder()
        self._results = results
        self._device = open_device(self.backend, profile.device)
        self._rig: Rig | None = None
        self._kinds: dict[HandleKind, str] = {}
        self._strategies: dict[Strategy, str] = {}
        self.peers = Peers(profile, self._device.info.uuid)
        self.peers.ready = self._warm_up

    @classmethod
    def of(cls, config: pytest.Config) -> Suite:
        """Make it from the command line.

        Raises
        ------
        UsageError, CapabilityError
            When there is no such backend, profile or device.
        """
        profile_name, backend = config.getoption("devipc_profile"), config.getoption("devipc_backend")
        if not (profile_name or backend):
            raise UsageError(
                "no backend was named", remedy="pass --devipc-backend NAME or --devipc-profile MODULE:NAME"
            )
        profile = find_profile(profile_name) if profile_name else BackendProfile(backend=backend)
        changes = {
            "backend": backend,
            "device": config.getoption("devipc_device"),
            "deadline_s": config.getoption("devipc_deadline"),
            "exclusive_device": config.getoption("devipc_exclusive"),
            "simulated": config.getoption("devipc_simulated"),
        }
        profile = dataclasses.replace(profile, **{name: value for name, value in changes.items() if value})
        if config.getoption("devipc_required"):
            profile = dataclasses.replace(profile, skips_allowed=False)
        only = tuple(part for part in (config.getoption("devipc_only") or "").split(",") if part)
        results = config.getoption("devipc_results")
        large = config.getoption("devipc_large")
        return cls(profile, large=large, only=only, results=Path(results) if results else None)

    @property
    def has_rig(self) -> bool:
        """True once the rig was opened."""
        return self._rig is not None

    @property
    def rig(self) -> Rig:
        """The rig of this process, warmed up."""
        if self._rig is None:
            self._rig = Rig(self._device, deadline_s=self.profile.deadline_s)
            with contextlib.suppress(DevIPCError, AssertionError):
                self._rig.warm_up()
        return self._rig

    @property
    def device(self) -> Any:
        """The device, opened; without a rig."""
        return self._device

    def why_no(self, interface: str) -> str:
        """Return the reason for an interface that is None."""
        answer = self._device.capabilities().get(interface)
        return answer.reason if answer is not None else "the backend gives no reason"

    def kinds(self) -> list[HandleKind]:
        """Return the kinds that the backend knows and those that the profile expects."""
        memory = self._device.memory
        known = list(memory.kinds()) if memory is not None else []
        return list(dict.fromkeys((*known, *(self.profile.handle_kinds or ()))))

    def kind_missing(self, kind: HandleKind) -> str:
        """Return why memory of ``kind`` cannot be had here, empty when it can.

        Raises
        ------
        AssertionError
            When the refusal has no type, or contradicts the backend's own answer.
        """
        if kind not in self._kinds:
            memory = self.rig.memory
            answer = memory.kinds().get(kind)
            try:
                memory.free(memory.allocate(PAGE, kind=kind))
            except CapabilityError as error:
                if answer is not None and answer.verdict is Verdict.YES:
                    raise AssertionError(f"kinds() says yes to {kind.value}, allocate refuses: {error}") from error
                self._kinds[kind] = error.message
            else:
                if answer is None or answer.verdict is Verdict.NO:
                    raise AssertionError(f"kinds() says no to {kind.value}, allocate allows it")
                self._kinds[kind] = ""
        return self._kinds[kind]

    def strategy_missing(self, strategy: Strategy) -> str:
        """Return why fences of ``strategy`` cannot be had here, empty when they can; signals one to find out.

        Raises
        ------
        AssertionError
            When the backend's own answer is a yes to what it then refuses.
        """
        if strategy not in self._strategies:
            rig = self.rig
            reason = ""
            try:
                if strategy is Strategy.STREAM_MEMOP:
                    rig.word_waits  # noqa: B018 - tries them
                with create_fence(rig.device, strategy) as fence:
                    fence.signal(rig.stream, 1)
            except CapabilityError as error:
                reason = error.message
            except Unavailable as error:
                reason = str(error)
            if reason and strategy in (Strategy.STREAM_MEMOP, Strategy.EVENT):
                mechanism = Mechanism(strategy.value)
                answer = rig.device.sync.mechanisms().get(mechanism) if rig.device.sync is not None else None
                if answer is not None and answer.verdict is Verdict.YES:
                    raise AssertionError(f"mechanisms() says yes to {mechanism.value}, which is refused: {reason}")
            self._strategies[strategy] = reason
        return self._strategies[strategy]

    def warm_up(self) -> None:
        """Open the rig and a first peer, so that no case pays for it or is charged with it."""
        with contextlib.suppress(Unavailable, DevIPCError, AssertionError):
            self.peers.give_back(self.peers.take())

    def _warm_up(self, peer: Peer) -> None:
        """Let a fresh peer, and this process, meet everything that a case may use; what fails here fails in a case."""
        with contextlib.suppress(DevIPCError, AssertionError, SuiteError):
            assert self.rig is not None
            peer.call(roles_memory.warm_up, timeout_s=4 * self.profile.deadline_s)
            for kind in self.kinds():
                with contextlib.suppress(DevIPCError, AssertionError):
                    self._exchange(peer, kind)

    def _exchange(self, peer: Peer, kind: HandleKind) -> None:
        with shared(self.rig, peer, PAGE, kind, seed=1) as (_, mapping):
            mapping.expect(PAGE, 1)
        with shared_by_peer(peer, PAGE, kind, seed=1) as theirs:
            self.rig.memory.close(self.rig.memory.open(theirs))

    def stuck(self) -> None:
        """Tell and write the results, and end all peers; the device of this process is stuck."""
        self._told(self.document())
        self._abandon()

    def _abandon(self) -> None:
        try:
            if self._results is not None:
                write_results(self._results, self.document())
        finally:
            self.peers.close()

    def document(self) -> dict[str, Any]:
        """Return the results so far, as the file has them."""
        settings = {
            "simulated": self.profile.simulated,
            "skips_allowed": self.profile.skips_allowed,
            "large": self.large,
            "only": list(self.only),
            "exclusive_device": self.profile.exclusive_device,
            "deviations": [dataclasses.asdict(known) for known in self.profile.deviations],
        }
        return self.recorder.document(self.backend, self._device.info, settings)

    def close(self) -> None:
        """Write the results, end all peers and close the device."""
        self._abandon()
        attempt(self._device.close if self._rig is None else self._rig.close, self.profile.deadline_s)


def suite_of(config: pytest.Config) -> Suite:
    """Return the run that the plugin made."""
    suite = getattr(config, "devipc_suite", None)
    if not isinstance(suite, Suite):
        raise SuiteError("the plugin is not active")
    return suite
