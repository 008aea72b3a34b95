"""Without torch there is no runtime to test; control alone needs none."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = (
    [] if importlib.util.find_spec("torch") else ["test_control.py", "test_process.py", "test_model.py"]
)
