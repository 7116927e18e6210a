"""Progress of a job on stderr: share done, rate, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tiered.console import duration_text, print_lines

PROGRESS_S = 2.0


class Progress:
    """Prints the progress every few seconds. Several parts of the work may report, each under its own name."""

    def __init__(
        self,
        label: str,
        *,
        as_text: Callable[[float], str],
        quiet: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._text, self._quiet = label, as_text, quiet
        self._clock_s = clock_s
        self._started_s = self._printed_s = clock_s()
        self._parts: dict[str, tuple[int, int]] = {}

    def update(self, done: int, total: int, part: str = "") -> None:
        """``done`` of ``total`` of one part. Thread-safe."""
        self._parts[part] = (done, total)
        now_s = self._clock_s()
        if self._quiet or now_s - self._printed_s < PROGRESS_S:
            return
        self._printed_s = now_s
        print_lines(self.line(), file=sys.stderr)

    def line(self) -> str:
        """``backfill 40% 12.0 MiB of 30.0 MiB, 6.0 MiB/s, 3.0s left``."""
        parts = list(self._parts.values())
        done, total = sum(one[0] for one in parts), sum(one[1] for one in parts)
        elapsed_s = self._clock_s() - self._started_s
        rate = done / elapsed_s if elapsed_s > 0 else 0.0
        left = f", {duration_text((total - done) / rate)} left" if rate > 0 else ""
        share = done / total if total else 1.0
        return (
            f"{self._label} {share:.0%} {self._text(done)} of {self._text(total)}, {self._text(rate)}/s{left}"
        )
