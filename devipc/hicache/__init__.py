"""The cache: pages of a device's memory pool kept in host memory, and brought back.

Owns nothing but the folder. :mod:`devipc.hicache.api` is what a scheduler imports; beside it here are the values that
it passes. Each folder is one role: ``client`` the scheduler's side, ``daemon`` the supervisor, ``engineproc`` the
process that loads a driver, ``engine`` the operations and lanes in whichever process, ``wire`` what passes between
them, ``moving`` the copies, ``planning`` and ``tier`` the numbers behind them, and ``reference`` a serving engine above
all of it. Which may import which is in ``pyproject.toml``. numpy is needed, and loaded only when one of the modules is.
"""
