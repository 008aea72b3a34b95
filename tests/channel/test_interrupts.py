"""An interrupt anywhere in a call of a channel: nobody behind it waits for what it has taken."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from devipc import turns
from devipc.channel import Channel, channel_pair, seqpacket
from devipc.errors import CompletionTimeout, UsageError
from devipc.turns import take_turn
from tests.host.test_interrupts import interrupt_at

FILES = (seqpacket.__file__, turns.__file__)


def test_a_send_that_is_interrupted_anywhere_keeps_no_later_one_waiting() -> None:
    point, hit = 0, True
    while hit:
        point += 1
        left, right = channel_pair()
        with left, right:
            hit = interrupt_at(point, partial(left.send, 77, b"first", timeout_s=5), FILES)
            sender = threading.Thread(target=left.send, args=(78, b"second"), kwargs={"timeout_s": 1})
            sender.start()
            sender.join()
            while (message := right.receive(2)).kind == 77:  # it went or it did not
                assert message.body == b"first"
            assert message.body == b"second", f"after an interrupt at place {point}"
        _is_given_back(left, point)
    assert point > 10


def test_a_receive_that_is_interrupted_anywhere_keeps_no_later_one_out() -> None:
    point, hit = 0, True
    while hit:
        point += 1
        left, right = channel_pair()
        with left, right:
            left.send(77, b"first", timeout_s=5)
            left.send(77, b"second", timeout_s=5)
            hit = interrupt_at(point, partial(right.receive, 5), FILES)
            try:
                assert right.receive(0.1).kind == 77
            except UsageError as error:
                raise AssertionError(f"the turn is kept after an interrupt at place {point}") from error
        _is_given_back(right, point)
    assert point > 10


def _is_given_back(channel: Channel, point: int) -> None:
    """Say whether the last user has closed the socket: no interrupted one counts for ever."""
    assert channel._users == 0, f"a user is counted after an interrupt at place {point}"
    assert channel._sock.fileno() == -1


def test_a_turn_is_noted_where_it_is_taken() -> None:
    turn, mine = threading.Lock(), [True]
    turn.acquire()
    assert not take_turn(turn, mine, 0.01)
    assert mine == [False]
    turn.release()
    assert take_turn(turn, mine)
    assert mine == [True]
    assert turn.locked()


def test_a_send_behind_one_that_does_not_end_is_over_in_time() -> None:
    left, right = channel_pair()
    with left, right, left._sending, pytest.raises(CompletionTimeout, match="another thread"):
        left.send(77, b"", timeout_s=0.05)
