"""The broker's time zone: configured, shown by its index files, or assumed."""

import struct
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tiered.broker_store.store import broker_zone

BEGIN_MS = 1_764_000_123_456


def index_file(store: Path, name_ms: int, offset_hours: float, begin_ms: int = BEGIN_MS) -> None:
    local = datetime.fromtimestamp(name_ms / 1000, UTC) + timedelta(hours=offset_hours)
    path = store / "index" / (local.strftime("%Y%m%d%H%M%S") + f"{name_ms % 1000:03d}")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack(">q", begin_ms) + bytes(32))


def hours(store: Path) -> float:
    offset = datetime.now(broker_zone(store).zone).utcoffset()
    assert offset is not None
    return offset / timedelta(hours=1)


@pytest.mark.parametrize("offset_hours", [8, -5, 5.75, 0, 14])
def test_index_files_show_the_zone(tmp_path: Path, offset_hours: float) -> None:
    index_file(tmp_path, BEGIN_MS + 15, offset_hours)
    index_file(tmp_path, BEGIN_MS + 3_600_015, offset_hours, BEGIN_MS + 3_600_000)
    assert hours(tmp_path) == offset_hours
    assert "by the broker's index files" in str(broker_zone(tmp_path))


def test_files_that_disagree_or_were_built_again_show_nothing(tmp_path: Path) -> None:
    here = time.localtime().tm_gmtoff / 3600
    index_file(tmp_path, BEGIN_MS + 500_000, 8)
    assert hours(tmp_path) == here
    index_file(tmp_path, BEGIN_MS, 8)
    index_file(tmp_path, BEGIN_MS, 3)
    assert hours(tmp_path) == here
    assert "of this host; if the broker's is another" in str(broker_zone(tmp_path))


def test_a_real_brokers_index_files(real_store: Callable[[str], Path]) -> None:
    assert hours(real_store("F") / "store") == 0
