"""A log written record by record is one that a broker's recovery walks through."""

import random
import resource
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.maintenance.restore.restoring import compact, packed_bytes
from tests.broker_store.scattered_log import FILE_BYTES, scattered, walked
from tiered.broker_store.restored_log import FILLER_BYTES_MAX, FILLER_TOPIC, Piece, RestoredLog
from tiered.errors import CorruptionError, StoreFullError, UsageError
from tiered.formats.record import decode_record
from tiered.model.queue import TopicFilter


@pytest.mark.parametrize("has_crc", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_record_is_at_its_place_and_fillers_are_between_them(
    tmp_path: Path, seed: int, has_crc: bool
) -> None:
    log, kept, end = scattered(
        tmp_path, random.Random(seed), begin_file=3, files=5, empty_file=5, has_crc=has_crc
    )
    assert log.has_crc == has_crc
    last_ms = log.seal(3 * FILE_BYTES, end, 1)
    assert last_ms == max(kept)
    assert log.seal(3 * FILE_BYTES, end, 1) == last_ms, "what was sealed is sealed again"
    found = dict(walked(tmp_path, end))
    assert {phys: data for phys, data in found.items() if phys in kept} == kept
    fillers = [decode_record(data) for phys, data in found.items() if phys not in kept]
    assert fillers and {record.topic for record in fillers} == {FILLER_TOPIC}
    assert max(len(record.data) for record in fillers) <= FILLER_BYTES_MAX
    assert all(record.sys_flag & 0xC == 0xC and record.store_timestamp in kept for record in fillers)
    assert all(path.stat().st_size == FILE_BYTES for path in tmp_path.iterdir())


def test_fillers_are_of_a_system_topic() -> None:
    assert TopicFilter().is_system(FILLER_TOPIC)


@pytest.mark.parametrize("has_crc", [False, True])
def test_a_compact_log_has_the_same_records_at_other_places(tmp_path: Path, has_crc: bool) -> None:
    log, kept, _ = scattered(
        tmp_path / "a", random.Random(7), begin_file=0, files=5, empty_file=2, has_crc=has_crc
    )
    length, begin = packed_bytes(log, FILE_BYTES), 4 * FILE_BYTES
    target = RestoredLog(tmp_path / "b", FILE_BYTES)
    moved = compact(log, target, begin)
    target.seal(begin, begin + length, 1)
    found = dict(walked(tmp_path / "b", begin + length))
    places = sorted(kept)
    new = moved(np.array(places)).tolist()
    assert [phys for phys in found if decode_record(found[phys]).topic != FILLER_TOPIC] == new
    for old, phys in zip(places, new, strict=True):
        assert found[phys][36:-20] == kept[old][36:-20]
        assert len(found[phys]) == len(kept[old])


def test_a_record_across_two_files_names_the_setting(tmp_path: Path) -> None:
    log = RestoredLog(tmp_path, 1000)
    piece = Piece(np.zeros(200, np.uint8), np.array([0]), np.array([200], np.int32), np.array([900]))
    with pytest.raises(UsageError, match="would cross the end of a commitlog file of 1000 bytes") as caught:
        log.write([piece])
    assert "--broker-conf" in caught.value.hint


def test_a_hole_too_small_for_a_filler_is_refused(tmp_path: Path) -> None:
    log, kept, _ = scattered(tmp_path, random.Random(1), begin_file=0, files=1, empty_file=9, has_crc=False)
    with pytest.raises(CorruptionError, match="smaller than a filler"):
        log.seal(0, max(kept) + len(kept[max(kept)]) + 50, 1)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = RestoredLog(tmp_path, 1 << 20)
    piece = Piece(np.ones(200, np.uint8), np.array([0]), np.array([200], np.int32), np.array([0]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StoreFullError):
            log.write([piece])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
