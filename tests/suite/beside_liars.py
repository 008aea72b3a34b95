"""Backends that lie once about extents that are opened side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from devipc.errors import DevIPCError
from devipc.spi import Backend, ExportedExtent, OpenedExtent
from tests.suite.lying import LIARS, Disguise, LyingBackend, caught_by

__all__ = ["LIARS"]


@caught_by("MEM-220")
def maps_here_and_there() -> Backend:
    class Memory(Disguise):
        """Maps each extent by itself and calls that one region."""

        def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
            opened = []
            for extent in extents:
                opened.append(self.inner.open(extent))
                self.inner.free(self.inner.allocate(4096 * len(opened)))
            return tuple(dataclasses.replace(one, region=opened[0].region) for one in reversed(opened[1:] + opened[:1]))

    return LyingBackend(memory=Memory)


@caught_by("MEM-221")
def keeps_the_good_ones() -> Backend:
    class Memory(Disguise):
        """Maps the good extents by themselves when one is bad, and forgets them."""

        def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> Any:
            try:
                return self.inner.open_side_by_side(extents)
            except DevIPCError:
                self.inner.open_side_by_side(extents[:-1])
                raise

    return LyingBackend(memory=Memory)


@caught_by("LIFE-220")
def the_first_close_ends_the_region() -> Backend:
    class Memory(Disguise):
        """Unmaps a whole region with the first extent that is closed."""

        def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> Any:
            opened = self.inner.open_side_by_side(extents)
            self.__dict__.setdefault("regions", []).append(list(opened))
            return opened

        def close(self, opened: OpenedExtent) -> None:
            for region in self.__dict__.setdefault("regions", []):
                if opened in region:
                    self.__dict__["regions"].remove(region)
                    for one in region:
                        self.inner.close(one)
                    return

    return LyingBackend(memory=Memory)
