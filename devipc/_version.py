"""The version of the distribution, in one place: the build reads this file, and so does the package.

It imports nothing.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
"""Version of the ``devipc`` distribution, as PEP 440 spells it."""
