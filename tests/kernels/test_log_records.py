"""The kernels of a log that is written record by record, beside plain Python."""

import struct
import zlib
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.broker_store.record_bytes import record
from tests.broker_store.scattered_log import record_at
from tiered.broker_store.restored_log import crc_property, filled
from tiered.kernels.log_records import (
    end_of_records,
    next_record,
    record_sizes,
    relocate,
    stored_ms_at,
    write_rows,
)

PHYS = 1 << 33


def filler(phys: int, size: int) -> bytes:
    data = bytearray(size)
    for patch in filled(phys, phys + size, 7, has_crc=False):
        data[patch.phys - phys : patch.phys - phys + len(patch.data)] = patch.data
    return bytes(data)


pieces = st.lists(
    st.tuples(st.sampled_from(["record", "record", "zeros", "filler", "elsewhere"]), st.integers(105, 400)),
    max_size=12,
)


def is_record(data: bytes, at: int) -> bool:
    """The oracle: a header at its own position that is not rolled back."""
    if at + 76 > len(data):
        return False
    size, magic = struct.unpack_from(">iI", data, at)
    (phys,), (flag,) = struct.unpack_from(">q", data, at + 28), struct.unpack_from(">i", data, at + 36)
    return size >= 91 and magic in (0xDAA320A7, 0xDAA320AB) and phys == PHYS + at and flag & 0xC != 0xC


@given(pieces, st.integers(0, 200))
def test_records_are_found_between_anything_else(parts: list[tuple[str, int]], cut: int) -> None:
    data = b""
    for kind, size in parts:
        phys = PHYS + len(data)
        data += {
            "record": record(phys, bytes(size), store_ms=phys),
            "zeros": bytes(size),
            "filler": filler(phys, size),
            "elsewhere": record(phys + 1, bytes(size)),
        }[kind]
    data = data[: max(0, len(data) - cut)]
    array = np.frombuffer(data or b"\0", np.uint8)
    length, position = len(data), 0
    while position + 76 <= length:
        end, stored_ms = end_of_records(array.ctypes.data, length, PHYS, position)
        at, expected_ms = position, -1
        while is_record(data, at):
            expected_ms = PHYS + at
            assert stored_ms_at(array.ctypes.data, at) == expected_ms
            at += struct.unpack_from(">i", data, at)[0]
        assert (end, stored_ms) == (at, expected_ms)
        following = next(
            (place for place in range(end, max(end, length - 75)) if is_record(data, place)), None
        )
        found = next_record(array.ctypes.data, length, PHYS, end)
        assert found == following if following is not None else found + 76 > length
        position = max(found, end)


def test_rows_are_written_where_they_belong(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    sizes = chance.integers(1, 50, 300).astype(np.int32)
    data = chance.integers(1, 255, int(sizes.sum())).astype(np.uint8)
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    offsets = starts + np.cumsum(chance.integers(0, 2, 300)) * 10
    with (tmp_path / "log").open("w+b") as file:
        assert write_rows(file.fileno(), data.ctypes.data, starts, sizes, offsets, 0) == 300
        assert write_rows(-1, data.ctypes.data, starts, sizes, offsets, 7) == 7, "a failed write"
        file.seek(0)
        found = file.read()
    expected = bytearray(len(found))
    for start, size, offset in zip(starts.tolist(), sizes.tolist(), offsets.tolist(), strict=True):
        expected[offset : offset + size] = data[start : start + size].tobytes()
    assert found == bytes(expected)


def test_a_moved_record_has_its_new_offset_and_checksum() -> None:
    data = record_at(1000, 300, stored_ms=5, has_crc=True) + record_at(1300, 200, stored_ms=6, has_crc=False)
    array = np.frombuffer(bytearray(data), np.uint8)
    sizes = np.zeros(9, np.int32)
    assert record_sizes(array.ctypes.data, len(array), sizes) == 2
    assert sizes[:2].tolist() == [300, 200]
    assert record_sizes(array.ctypes.data, len(array) - 1, sizes) == 1
    relocate(array.ctypes.data, np.array([0, 300]), sizes[:2], np.array([1 << 40, 77]))
    moved = array.tobytes()
    assert struct.unpack_from(">q", moved, 28) == (1 << 40,)
    assert struct.unpack_from(">q", moved, 328) == (77,)
    assert moved[280:300] == crc_property(zlib.crc32(moved[:280]))
    assert moved[36:280] == data[36:280] and moved[336:] == data[336:]
