"""Kernels of a commitlog that is written record by record: records to their places, and which bytes are records.

Fillers (tiered.broker_store.restored_log) are no records here. Oracle: ``tests.kernels.test_log_records``.
"""

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.checksums import crc32
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import load_be32, load_be64, load_le64, load_u8, put_u8, write_at
from tiered.kernels.record_checks import (
    BORN_HOST_V6,
    CRC32_NAME,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    RESERVED_CRC_BYTES,
)

HEAD_BYTES = 76
"""A record's bytes up to its store timestamp."""
_ROLLED_BACK = 0xC


@kernel
def write_rows(
    file: Int,
    address: Int,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int32],
    offsets: NDArray[np.int64],
    row: Int,
) -> Int:
    """Write the records from number ``row`` on to a file descriptor, each from ``address + starts[i]`` to
    ``offsets[i]`` of the file. Records that are adjacent in memory and in the file are one write. Returns the number of
    the first record of a write that failed or was short, or how many records there are."""
    rows = len(starts)
    while row < rows:
        last: Int = row
        length: Int = np.int64(sizes[row])
        while (
            last + 1 < rows
            and starts[last + 1] == starts[row] + length
            and offsets[last + 1] == offsets[row] + length
        ):
            last += 1
            length += sizes[last]
        if write_at(file, address + starts[row], length, offsets[row]) != length:
            return row
        row = last + 1
    return row


@kernel
def is_record(address: Int, position: Int, phys: Int) -> Int:
    """Whether a record begins at ``address + position``, which is commitlog offset ``phys``: by size, magic and its own
    offset. A filler (what a restore writes in place of log bytes that were not archived) is a rolled back transaction,
    and no record here."""
    if load_be32(address, position) < RECORD_BYTES_MIN or load_be64(address, position + 28) != phys:
        return False
    magic = load_be32(address, position + 4)
    if magic != MAGIC_V1 and magic != MAGIC_V2:  # noqa: PLR1714 - kernels compare faster
        return False
    return load_be32(address, position + 36) & _ROLLED_BACK != _ROLLED_BACK


@kernel
def stored_ms_at(address: Int, position: Int) -> Int:
    """Store timestamp of the record at ``position``."""
    is_v6 = load_be32(address, position + 36) & BORN_HOST_V6
    return load_be64(address, position + 48 + (20 if is_v6 else 8))


@kernel
def end_of_records(address: Int, length: Int, begin_phys: Int, position: Int) -> tuple[Int, Int]:
    """Where the records that follow one another from ``position`` on end, and the store timestamp of the last one, -1
    if there is none. ``begin_phys``: the commitlog offset of ``address``, at which ``length`` bytes are. The last
    record may end beyond them."""
    stored_ms = np.int64(-1)
    while position + HEAD_BYTES <= length and is_record(address, position, begin_phys + position):
        stored_ms = stored_ms_at(address, position)
        position += load_be32(address, position)
    return position, stored_ms


@kernel
def next_record(address: Int, length: Int, begin_phys: Int, position: Int) -> Int:
    """Where the next record begins at or after ``position`` in the ``length`` bytes at ``address``, which are at
    commitlog offset ``begin_phys``. If there is none, the first position where the header would not be inside."""
    last = length - HEAD_BYTES
    while position <= last:
        # The first byte of each magic is not 0: a quick test, as most bytes here are zeros.
        if load_u8(address, position + 4) and is_record(address, position, begin_phys + position):
            return position
        position += 1
    return position


@kernel
def record_sizes(address: Int, length: Int, sizes: NDArray[np.int32]) -> Int:
    """Fills ``sizes`` with the sizes of the whole records that follow one another in the ``length`` bytes at
    ``address``, as many as fit into it. Returns their number."""
    count, position = 0, np.int64(0)
    while position + 4 <= length and count < len(sizes):
        size = load_be32(address, position)
        if size < RECORD_BYTES_MIN or position + size > length:
            break
        sizes[count] = size
        position += size
        count += 1
    return count


@kernel
def relocate(
    address: Int, starts: NDArray[np.int64], sizes: NDArray[np.int32], phys: NDArray[np.int64]
) -> Int:
    """Change the records at ``address + starts[i]`` in place, so that they belong at the commitlog offsets ``phys``:
    PHYSICALOFFSET in the header, and the checksum of the whole record in the property ``__CRC32#``, if it has that."""
    for row in range(len(starts)):
        begin, end = address + starts[row], address + starts[row] + sizes[row]
        for byte in range(8):
            put_u8(begin, 28 + byte, phys[row] >> (56 - 8 * byte) & 0xFF)
        reserved = end - RESERVED_CRC_BYTES
        if load_le64(reserved, 0) == CRC32_NAME and load_u8(reserved, 8) == 1:
            crc = crc32(begin, 0, reserved - begin) & 0x7FFFFFFF
            for digit in range(10):
                put_u8(reserved, 9 + digit, 48 + crc % 10)
                crc //= 10
    return 0
