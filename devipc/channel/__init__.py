"""Everything that connects two processes: messages with descriptors, paths, signs of life, questions and answers.

Owns the public names of this floor. It knows no memory, fence or device.
"""

from __future__ import annotations

from devipc.channel.arena import Arena, ArenaReader
from devipc.channel.identity import compare_facts, local_facts, process_instance
from devipc.channel.link import Link, PeerIdentity, PeerState, Reply
from devipc.channel.listener import Listener, connect, default_directory
from devipc.channel.liveness import PeerWatch, own_life
from devipc.channel.seqpacket import Channel, LostMessage, Message, channel_pair

__all__ = [
    "Arena",
    "ArenaReader",
    "Channel",
    "Link",
    "Listener",
    "LostMessage",
    "Message",
    "PeerIdentity",
    "PeerState",
    "PeerWatch",
    "Reply",
    "channel_pair",
    "compare_facts",
    "connect",
    "default_directory",
    "local_facts",
    "own_life",
    "process_instance",
]
