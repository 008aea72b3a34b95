"""The first two frames of a connection to an engine: versions, features, and whether both make the same page keys.

Owns what is agreed, and one clear error for every disagreement. It does no I/O.
"""

from __future__ import annotations

from typing import Literal

from devipc.errors import ProtocolError
from devipc.hicache.keys import KEY_VERSION, SELF_TEST_KEY
from devipc.hicache.wire.protocol import FEATURE_PASSED, MAGIC, HelloFrame, WelcomeFrame

__all__ = ["FEATURES", "PROTOCOL_MAX", "PROTOCOL_MIN", "accept_welcome", "answer_hello", "hello"]

PROTOCOL_MIN = 1
"""Oldest version that is spoken here."""
PROTOCOL_MAX = 1
"""Newest version that is spoken here."""
FEATURES = FEATURE_PASSED
"""Features that both sides have here."""


def hello(*, features: int, client: bytes, way: Literal["rings", "messages"]) -> HelloFrame:
    """Return this side's greeting; see :class:`~devipc.hicache.wire.protocol.HelloFrame`."""
    return HelloFrame(
        magic=MAGIC,
        min_version=PROTOCOL_MIN,
        max_version=PROTOCOL_MAX,
        features=features,
        key_version=KEY_VERSION,
        self_test=SELF_TEST_KEY,
        client=client,
        way=way,
    )


def answer_hello(
    theirs: HelloFrame,
    *,
    features: int,
    epoch: int,
    layer_groups: tuple[int, ...],
    engine_path: str,
    engine_instance: bytes,
    device_uuid: str,
    backend: str,
    write_policy: str,
) -> WelcomeFrame:
    """Return the answer to a greeting: the newest version and all features that both sides have, and the rest as given.

    Raises
    ------
    ProtocolError
        With code ``version`` when there is no common version, ``self_test`` when both make other keys from the same
        tokens: pages would never be found, or worse.
    """
    version = min(theirs.max_version, PROTOCOL_MAX)
    if not max(theirs.min_version, PROTOCOL_MIN) <= version:
        raise ProtocolError(
            f"the client speaks protocol {theirs.min_version} to {theirs.max_version}, this side {PROTOCOL_MIN} to"
            f" {PROTOCOL_MAX}",
            code="version",
            remedy="run devipc versions that have a protocol in common",
        )
    _check_keys(theirs)
    return WelcomeFrame(
        magic=MAGIC,
        version=version,
        features=theirs.features & features,
        key_version=KEY_VERSION,
        self_test=SELF_TEST_KEY,
        epoch=epoch,
        layer_groups=layer_groups,
        engine_path=engine_path,
        engine_instance=engine_instance,
        device_uuid=device_uuid,
        backend=backend,
        write_policy=write_policy,
    )


def accept_welcome(welcome: WelcomeFrame, *, features: int) -> None:
    """Check an engine's answer against what was offered; raises ProtocolError."""
    if not PROTOCOL_MIN <= welcome.version <= PROTOCOL_MAX or welcome.features & ~features:
        raise ProtocolError(
            f"version {welcome.version} and features {welcome.features:#x} were not offered",
            code="version",
            remedy="run devipc versions that have a protocol in common",
        )
    _check_keys(welcome)


def _check_keys(theirs: HelloFrame | WelcomeFrame) -> None:
    if (theirs.key_version, theirs.self_test) != (KEY_VERSION, SELF_TEST_KEY):
        raise ProtocolError(
            f"the peer makes other page keys (version {theirs.key_version}, here {KEY_VERSION})",
            code="self_test",
            remedy="run the same devipc version on both sides, and check their hashlib and numpy",
        )
