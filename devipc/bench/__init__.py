"""What moving pages costs here: every figure beside a floor that was measured in the same run.

``transfer`` measures the cache's transfers, ``control`` its requests, ``sync`` hand-overs between processes,
``interference`` what a model in another process loses, ``footprint`` what an engine holds. None of it knows a vendor.
"""
