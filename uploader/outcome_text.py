"""The result of a backfill in one line, shared by `tiered` and `tiered-spark`."""

from __future__ import annotations

from tiered.console import counted, duration_text, names_text, size_text
from uploader.offload_status import OffloadResult

DAMAGED_TABLES = "DAMAGED tables of the broker NOT archived (an earlier copy in the archive stays current)"


def outcome_text(outcome: OffloadResult) -> str:
    """``1,000 messages, 1.0 MiB as 200.0 KiB in 3 objects, 1.2s (850.0 KiB/s)``, and warnings."""
    rate = outcome.raw_bytes / outcome.duration_s if outcome.duration_s > 0 else 0.0
    parts = [
        f"{counted(outcome.messages, 'message')}, {size_text(outcome.raw_bytes)} as {size_text(outcome.stored_bytes)}"
        f" in {counted(outcome.objects, 'object')}, {duration_text(outcome.duration_s)} ({size_text(rate)}/s)"
    ]
    if outcome.commits == 0 and outcome.messages == 0:
        parts = [f"nothing to do, everything up to physical offset {outcome.to_phys:,} is archived"]
    for count, what, result in (
        (outcome.hidden, "queue", "hidden (deleted at the broker)"),
        (outcome.shown_again, "hidden queue", "shown again (the broker has it)"),
        (outcome.missing, "queue", "MISSING at the broker, whose table has the topic: archived all the same"),
        (outcome.gaps, "gap", "recorded"),
        (outcome.damaged, "DAMAGED range", "of the commitlog skipped"),
        (outcome.lost, "range", "of the commitlog MISSING"),
    ):
        if count:
            parts.append(f"{counted(count, what)} {result}")
    if outcome.damaged_tables:
        parts.append(f"{DAMAGED_TABLES}: {'; '.join(outcome.damaged_tables)}")
    if outcome.excluded:
        parts.append(f"excluded by topics.include and topics.exclude: {names_text(outcome.excluded)}")
    if outcome.excluded_before:
        parts.append(
            f"NOT archived, because an earlier start excluded them: {names_text(outcome.excluded_before)}; archive "
            "what the broker still has with --include to another archive URL"
        )
    return "; ".join(parts)
