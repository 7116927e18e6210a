"""Progress of a long command on stderr: a bar on a terminal, else a line in the log every ten seconds."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Never

from tqdm import tqdm

from tiered.clock import MACHINE_CLOCK, Clock

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0


class Progress:
    """Progress in bytes, or in what ``unit`` names, towards a total that may grow."""

    def __init__(
        self,
        label: str,
        total: int,
        *,
        quiet: bool = False,
        unit: str = "",
        is_terminal: bool | None = None,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``label`` begins each line; ``quiet`` shows nothing; ``unit`` names what is counted, empty for bytes;
        ``is_terminal``: whether stderr is a terminal, which gets a bar instead of lines; None finds out."""
        self._label = label
        self._quiet = quiet
        self._clock = clock
        self._started_s = self._line_s = clock.monotonic_s()
        self._parts = {"": (0, total)}
        """(done, total) of each part of the work that reports separately."""
        self._done, self._total = 0, total
        self._unit = unit
        terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self._bar: tqdm[Never] | None = None
        if terminal and not quiet:
            divisor = 1000 if unit else 1024
            self._bar = tqdm(
                desc=label,
                total=total,
                unit=f" {unit}" if unit else "B",
                unit_scale=True,
                unit_divisor=divisor,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, done: int, total: int, part: str = "") -> None:
        """Show that ``done`` of ``total`` is done: of the whole work or, if several threads work, of that named
        ``part``, whose numbers are added to the others'. Thread-safe."""
        self._parts[part] = done, total
        done, total = map(sum, zip(*list(self._parts.values()), strict=True))
        advanced = done - self._done
        self._done, self._total = done, total
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(advanced)
        elif not self._quiet and self._clock.monotonic_s() - self._line_s >= LINE_INTERVAL_S:
            self._line_s = self._clock.monotonic_s()
            logger.info("%s", self.line())

    def line(self) -> str:
        """The progress as a line: ``label 40% 12.0 of 30.0 MiB, 6.0 MiB/s, 3 s left``, or with a unit ``label 40% 1,200
        of 3,000 messages, 600/s, 3 s left``."""
        elapsed_s = self._clock.monotonic_s() - self._started_s
        rate = self._done / elapsed_s if elapsed_s > 0 else 0.0
        left = (self._total - self._done) / rate if rate > 0 else float("inf")
        share = self._done / self._total if self._total else 1.0
        eta = f"{left:.0f} s left" if left != float("inf") else "time left unknown"
        if self._unit:
            return f"{self._label} {share:.0%} {self._done:,} of {self._total:,} {self._unit}, {rate:,.0f}/s, {eta}"
        mib = 1024 * 1024
        return (
            f"{self._label} {share:.0%} {self._done / mib:.1f} of {self._total / mib:.1f} MiB, "
            f"{rate / mib:.1f} MiB/s, {eta}"
        )
