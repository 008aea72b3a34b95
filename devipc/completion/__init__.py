"""Completion: knowing in one process that another process's device work is done.

Owns the public names of this floor. It knows no socket: descriptors and bytes are carried by whoever calls it.
"""

from __future__ import annotations

from devipc.completion.chooser import Candidate, Decision, PeerLink, Phase, choose
from devipc.completion.consumer import ConsumerFence
from devipc.completion.factory import create_fence, open_fence
from devipc.completion.fence import Fence
from devipc.completion.handle import FenceHandle, decode_fence_handle, encode_fence_handle
from devipc.completion.offers import offers
from devipc.completion.page import poison_page
from devipc.completion.producer import ProducerFence
from devipc.completion.trial import TrialResponder

__all__ = [
    "Candidate",
    "ConsumerFence",
    "Decision",
    "Fence",
    "FenceHandle",
    "PeerLink",
    "Phase",
    "ProducerFence",
    "TrialResponder",
    "choose",
    "create_fence",
    "decode_fence_handle",
    "encode_fence_handle",
    "offers",
    "open_fence",
    "poison_page",
]
