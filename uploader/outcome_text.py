"""The result of a backfill in one line, shared by `tiered` and `tiered-spark`."""

from __future__ import annotations

from typing import Protocol

from tiered.console import counted, duration_text, names_text, size_text


class Outcome(Protocol):
    """Counts of one run; sizes in bytes, physical offsets."""

    @property
    def messages(self) -> int: ...
    @property
    def raw_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def commits(self) -> int: ...
    @property
    def objects(self) -> int: ...
    @property
    def to_phys(self) -> int: ...
    @property
    def gaps(self) -> int: ...
    @property
    def damaged(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def excluded(self) -> tuple[str, ...]: ...
    @property
    def excluded_before(self) -> tuple[str, ...]: ...


def outcome_text(outcome: Outcome) -> str:
    """``1,000 messages, 1.0 MiB as 200.0 KiB in 3 objects, 1.2s (850.0 KiB/s)``, and warnings."""
    rate = outcome.raw_bytes / outcome.duration_s if outcome.duration_s > 0 else 0.0
    parts = [
        f"{counted(outcome.messages, 'message')}, {size_text(outcome.raw_bytes)} as {size_text(outcome.stored_bytes)}"
        f" in {counted(outcome.objects, 'object')}, {duration_text(outcome.duration_s)} ({size_text(rate)}/s)"
    ]
    if outcome.commits == 0 and outcome.messages == 0:
        parts = [f"nothing to do, everything up to physical offset {outcome.to_phys:,} is archived"]
    for count, what in (
        (outcome.hidden, "queues hidden (deleted at the broker)"),
        (outcome.gaps, "gaps recorded"),
        (outcome.damaged, "DAMAGED ranges of the commitlog skipped"),
        (outcome.lost, "ranges of the commitlog MISSING"),
    ):
        if count:
            parts.append(f"{count} {what}")
    if outcome.excluded:
        parts.append(f"excluded by topics.include and topics.exclude: {names_text(outcome.excluded)}")
    if outcome.excluded_before:
        parts.append(
            f"NOT archived, because an earlier start excluded them: {names_text(outcome.excluded_before)}; archive "
            "what the broker still has with --include to another archive URL"
        )
    return "; ".join(parts)
