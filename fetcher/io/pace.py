"""CPU time of one read that may take long, in slices: between them the event loop serves others.

A coroutine of the core checks ``is_over`` as often as it can, and calls ``next_slice`` when it is true.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from fetcher.io.waiting import Wait

SLICE_S: Final = 0.002
READ_S: Final = 0.04


class Turn(Wait[None]):
    """Waits for a slice, not for data."""


class Pace:
    """Slices of SLICE_S, waits for data included, together READ_S. ``turn``: a future that is done when a slice may
    begin."""

    def __init__(self, turn: Callable[[], Future[None]]) -> None:
        self._turn = turn
        self._slices = round(READ_S / SLICE_S)
        self._ends_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """Whether the slice has ended, or none has begun."""
        return time.perf_counter() >= self._ends_s

    async def next_slice(self) -> bool:
        """Wait until a slice begins; False if the read has used all of them."""
        if not self._slices:
            return False
        self._slices -= 1
        await Turn(self._turn())
        self._ends_s = time.perf_counter() + SLICE_S
        return True
