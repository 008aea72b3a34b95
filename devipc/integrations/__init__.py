"""From arrays, tensors and addresses to what can be shared, and back, without a copy.

Owns names only. The one folder of the library where the words of array frameworks stand; torch and numpy are
imported by :mod:`~devipc.integrations.torch_view` and :mod:`~devipc.integrations.numpy_view` when a tensor or array
is really there.
"""

from __future__ import annotations

from devipc.integrations.buffers import BufferView, check_device, describe
from devipc.integrations.dtypes import itemsize_of
from devipc.integrations.foreign import ForeignBuffer
from devipc.integrations.keeper import Hold, ViewKeeper

__all__ = ["BufferView", "ForeignBuffer", "Hold", "ViewKeeper", "check_device", "describe", "itemsize_of"]
