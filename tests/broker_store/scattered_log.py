"""A log of records with random sizes, of which some are kept, as `tiered restore` writes it."""

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.broker_store.record_bytes import record
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.damage import record_size
from tiered.broker_store.restored_log import Piece, RestoredLog, crc_property

FILE_BYTES = 1 << 20


def record_at(phys: int, size: int, *, stored_ms: int, has_crc: bool) -> bytes:
    """A record of ``size`` bytes at ``phys``, perhaps with its checksum as the last property."""
    body = bytes([phys % 251]) * (size - 92 - (20 if has_crc else 0))
    data = bytearray(record(phys, body, store_ms=stored_ms))
    if has_crc:
        data[-2:], data[:4] = (20).to_bytes(2, "big"), size.to_bytes(4, "big")
        data += crc_property(zlib.crc32(data))
    return bytes(data)


def scattered(
    directory: Path, chance: random.Random, *, begin_file: int, files: int, empty_file: int, has_crc: bool
) -> tuple[RestoredLog, dict[int, bytes], int]:
    """A log in ``directory`` before it is sealed; its records by physical offset; where it ends."""
    log = RestoredLog(directory, FILE_BYTES)
    phys, end = begin_file * FILE_BYTES, (begin_file + files) * FILE_BYTES + 12_345
    kept: dict[int, bytes] = {}
    while phys < end:
        size = chance.choice([150, 151, 200, 1_000, 90_000]) + chance.randint(0, 500)
        if phys % FILE_BYTES + size + 8 > FILE_BYTES:
            phys = (phys // FILE_BYTES + 1) * FILE_BYTES
            continue
        if chance.random() < 0.6 and phys // FILE_BYTES != empty_file:
            kept[phys] = record_at(phys, size, stored_ms=phys, has_crc=has_crc)
        phys += size
    places = sorted(kept)
    chance.shuffle(places)
    for begin in range(0, len(places), 40):
        part = sorted(places[begin : begin + 40])
        sizes = np.array([len(kept[place]) for place in part], np.int32)
        data = np.frombuffer(b"".join(kept[place] for place in part), np.uint8)
        log.write([Piece(data, np.cumsum(sizes, dtype=np.int64) - sizes, sizes, np.array(part, np.int64))])
    return log, kept, phys


def walked(directory: Path, end_phys: int) -> Iterator[tuple[int, bytes]]:
    """Every record from the log's begin to ``end_phys``, as a broker's recovery finds them; all are valid."""
    log = CommitLog([directory])
    phys = log.min_phys
    while phys < end_phys:
        file = log.file_at(phys)
        assert file is not None
        if log.is_end_marker(phys):
            phys = file.end_phys
            continue
        size = record_size(log, phys)
        assert size is not None, phys
        yield phys, log.read(phys, size)
        phys += size
    assert phys == end_phys
