"""The tables of operations as text, one transition a line: ``state: event -> state [/ what the other side is told]``.

Owns the rules and no code; ``operations`` reads them, and the tests walk through every path of both sides together.
"""

from __future__ import annotations

__all__ = ["TEXT"]

_BACKUP_CLIENT = """
submitted: refused -> refused
submitted: source_released -> source_released
submitted: failed -> failed
submitted: discarded -> discarded
submitted: timed_out -> timed_out
submitted: confirm_fences -> confirmed / confirmed
submitted: discard_batch -> discarded / discard
submitted: give_up -> cancelled / cancel
submitted: engine_dying -> lost
confirmed: refused -> refused
confirmed: source_released -> publishable
confirmed: failed -> failed
confirmed: discarded -> discarded
confirmed: timed_out -> timed_out
confirmed: give_up -> cancelled / cancel
confirmed: engine_dying -> lost
source_released: confirm_fences -> publishable / confirmed
source_released: discard_batch -> discarded / discard
source_released: discarded -> discarded
source_released: timed_out -> timed_out
source_released: give_up -> cancelled / cancel
source_released: engine_dying -> lost
publishable: visible -> visible
publishable: timed_out -> timed_out
publishable: give_up -> cancelled / cancel
publishable: engine_dying -> lost
visible: stored -> stored
visible: completed -> completed
visible: failed -> failed
visible: give_up -> cancelled / cancel
visible: engine_dying -> lost
stored: completed -> completed
stored: give_up -> cancelled / cancel
stored: engine_dying -> lost
"""

_BACKUP_ENGINE = """
received: refuse -> refused / refused
received: admit -> waiting
received: confirmed -> received_confirmed
received: discard -> discarded
received: cancel -> cancelled
received: client_dying -> lost
received_confirmed: refuse -> refused / refused
received_confirmed: admit -> waiting_confirmed
received_confirmed: cancel -> cancelled
received_confirmed: client_dying -> lost
waiting: refuse -> refused / refused
waiting: fence_ready -> copying
waiting: fence_poisoned -> discarded / discarded
waiting: confirmed -> waiting_confirmed
waiting: discard -> discarded
waiting: cancel -> cancelled
waiting: deadline -> timed_out / timed_out
waiting: client_dying -> lost
waiting_confirmed: refuse -> refused / refused
waiting_confirmed: fence_ready -> copying_confirmed
waiting_confirmed: fence_poisoned -> discarded / discarded
waiting_confirmed: cancel -> cancelled
waiting_confirmed: deadline -> timed_out / timed_out
waiting_confirmed: client_dying -> lost
copying: copied -> unconfirmed / source_released
copying: copy_failed -> failed / failed
copying: confirmed -> copying_confirmed
copying: discard -> dropping
copying: cancel -> cancelling
copying: deadline -> expiring
copying: client_dying -> orphaned
copying_confirmed: copied -> copied / source_released
copying_confirmed: copy_failed -> failed / failed
copying_confirmed: cancel -> cancelling
copying_confirmed: deadline -> expiring
copying_confirmed: client_dying -> orphaned
cancelling: drained -> cancelled
cancelling: client_dying -> orphaned
dropping: drained -> discarded
dropping: client_dying -> orphaned
expiring: drained -> timed_out / timed_out
expiring: confirmed -> expiring_confirmed
expiring: cancel -> cancelling
expiring: discard -> dropping
expiring: client_dying -> orphaned
expiring_confirmed: drained -> timed_out / timed_out
expiring_confirmed: cancel -> cancelling
expiring_confirmed: client_dying -> orphaned
orphaned: drained -> lost
unconfirmed: confirmed -> copied
unconfirmed: discard -> discarded
unconfirmed: cancel -> cancelled
unconfirmed: deadline -> timed_out / timed_out
unconfirmed: client_dying -> lost
copied: word_clear -> clear
copied: word_set -> cancelled
copied: cancel -> cancelled
copied: deadline -> timed_out / timed_out
copied: client_dying -> lost
clear: publish -> visible / visible
clear: client_dying -> lost
clear: cancel -> cancelled
visible: stored_pages -> stored / stored
visible: store_failed -> failed / failed
visible: finish -> completed / completed
visible: cancel -> cancelled
visible: client_dying -> lost
stored: finish -> completed / completed
stored: cancel -> cancelled
stored: client_dying -> lost
"""

_RESTORE_CLIENT = """
submitted: refused -> refused
submitted: admitted -> admitted
submitted: give_up -> giving_up / cancel
submitted: engine_dying -> quarantined
admitted: completed -> completed
admitted: failed -> failed
admitted: discarded -> discarded
admitted: timed_out -> timed_out
admitted: give_up -> abandoned / cancel
admitted: engine_dying -> quarantined
giving_up: refused -> refused
giving_up: admitted -> abandoned
giving_up: cancelled -> cancelled
giving_up: engine_dying -> quarantined
abandoned: completed -> completed
abandoned: failed -> failed
abandoned: discarded -> discarded
abandoned: timed_out -> timed_out
abandoned: cancelled -> cancelled
abandoned: engine_dying -> quarantined
quarantined: engine_gone -> lost
"""

_RESTORE_ENGINE = """
received: refuse -> refused / refused
received: admit -> admitted / admitted
received: cancel -> cancelled / cancelled
received: client_dying -> lost
admitted: fence_ready -> copying
admitted: fence_poisoned -> discarded / discarded
admitted: cancel -> cancelled / cancelled
admitted: deadline -> timed_out / timed_out
admitted: client_dying -> lost
copying: copied -> completed / completed
copying: copy_failed -> failed / failed
copying: cancel -> cancelling
copying: deadline -> expiring
copying: client_dying -> orphaned
cancelling: drained -> cancelled / cancelled
cancelling: client_dying -> orphaned
expiring: drained -> timed_out / timed_out
expiring: cancel -> cancelling
expiring: client_dying -> orphaned
orphaned: drained -> lost
"""

_PREFETCH_CLIENT = """
submitted: refused -> refused
submitted: admitted -> admitted
submitted: give_up -> cancelled / cancel
submitted: engine_dying -> lost
admitted: completed -> completed
admitted: failed -> failed
admitted: timed_out -> timed_out
admitted: give_up -> cancelled / cancel
admitted: engine_dying -> lost
"""

_PREFETCH_ENGINE = """
received: refuse -> refused / refused
received: admit -> loading / admitted
received: cancel -> cancelled
received: client_dying -> lost
loading: copied -> loaded
loading: copy_failed -> failed / failed
loading: cancel -> cancelling
loading: deadline -> expiring
loading: client_dying -> orphaned
loaded: publish -> completed / completed
loaded: cancel -> cancelled
loaded: client_dying -> lost
cancelling: drained -> cancelled
cancelling: client_dying -> orphaned
expiring: drained -> timed_out / timed_out
expiring: cancel -> cancelling
expiring: client_dying -> orphaned
orphaned: drained -> lost
"""

_LOOKUP_CLIENT = """
submitted: refused -> refused
submitted: completed -> completed
submitted: leased -> leased
submitted: use_lease -> ending
submitted: release_lease -> ending
submitted: give_up -> cancelled / cancel
submitted: engine_dying -> lost
ending: refused -> refused
ending: completed -> completed
ending: leased -> completed / release
ending: give_up -> cancelled / cancel
ending: engine_dying -> lost
leased: use_lease -> completed / use
leased: release_lease -> completed / release
leased: expired -> expired
leased: engine_dying -> lost
"""

_LOOKUP_ENGINE = """
received: refuse -> refused / refused
received: finish -> completed / completed
received: found -> leased / leased
received: cancel -> cancelled
received: client_dying -> lost
leased: use -> completed
leased: release -> completed
leased: cancel -> cancelled
leased: expire -> expired / expired
leased: client_dying -> lost
"""

_UNREGISTER_CLIENT = """
submitted: refused -> refused
submitted: completed -> completed
submitted: engine_dying -> quarantined
quarantined: engine_gone -> lost
"""

_UNREGISTER_ENGINE = """
received: refuse -> refused / refused
received: admit -> draining
received: client_dying -> orphaned
draining: drained -> completed / completed
draining: client_dying -> orphaned
orphaned: drained -> lost
"""

_CALL_CLIENT = """
submitted: refused -> refused
submitted: completed -> completed
submitted: failed -> failed
submitted: give_up -> cancelled
submitted: engine_dying -> lost
"""

_CALL_ENGINE = """
received: refuse -> refused / refused
received: finish -> completed / completed
received: copy_failed -> failed / failed
received: client_dying -> lost
"""

TEXT = {
    "backup": (_BACKUP_CLIENT, _BACKUP_ENGINE),
    "restore": (_RESTORE_CLIENT, _RESTORE_ENGINE),
    "prefetch": (_PREFETCH_CLIENT, _PREFETCH_ENGINE),
    "lookup": (_LOOKUP_CLIENT, _LOOKUP_ENGINE),
    "unregister": (_UNREGISTER_CLIENT, _UNREGISTER_ENGINE),
    "call": (_CALL_CLIENT, _CALL_ENGINE),
}
"""Table name to the client's and the engine's transitions."""
