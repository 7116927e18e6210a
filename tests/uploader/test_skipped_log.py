"""Why offsets are missing, as earlier processes recorded it: only what they skipped behind a queue's last record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiered.catalog.state import CatalogState
from tiered.model.tables import GapReason
from uploader.log_batch import DamagedRange, LogBatch, LostRange
from uploader.skipped_log import DAMAGED, SkippedLog, skipped_settings


def state_after(batch: LogBatch, *, line: int = 1) -> CatalogState:
    return replace(CatalogState(), settings=skipped_settings(batch, line))


def test_only_what_was_skipped_behind_a_queues_last_record_is_a_reason() -> None:
    batch = LogBatch(1 << 16)
    assert skipped_settings(batch, 1) == {}
    assert SkippedLog.of(state_after(batch)) == SkippedLog()
    batch.damaged += [DamagedRange(100, 200, "", ""), DamagedRange(300, 400, "", "")]
    batch.lost += [LostRange(500, 600, "no file holds it")]
    skipped = SkippedLog.of(state_after(batch))
    assert skipped == SkippedLog(400, 600)
    assert skipped.reason(300) is GapReason.DAMAGED
    assert skipped.reason(450) is GapReason.BROKER_DELETED
    assert skipped.reason(600) is GapReason.NEVER_WRITTEN


def test_physical_offsets_of_another_log_history_say_nothing() -> None:
    batch = LogBatch(1 << 16)
    batch.damaged += [DamagedRange(100, 200, "", "")]
    assert SkippedLog.of(state_after(batch, line=2)) == SkippedLog()


@pytest.mark.parametrize("value", [None, 3, [1], [1, "x"], {"a": 1}])
def test_impossible_values_are_ignored(value: object) -> None:
    assert SkippedLog.of(replace(CatalogState(), settings={DAMAGED: value})) == SkippedLog()
