"""Sessions: what most users touch. One process exports, others import; both may share memory and fences.

Owns the wiring of the floors below to each other: exports, leases, mappings, fences and the death of peers.
"""

from __future__ import annotations

from devipc.channel.link import PeerState
from devipc.session.endpoint import Endpoint
from devipc.session.events import PeerEvent
from devipc.session.exporter import Exporter
from devipc.session.importer import Importer
from devipc.session.peer import Peer
from devipc.session.remote import RemoteMemory
from devipc.session.shares import Share

__all__ = ["Endpoint", "Exporter", "Importer", "Peer", "PeerEvent", "PeerState", "RemoteMemory", "Share"]
