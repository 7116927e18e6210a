"""Plain Python that says what the segment kernels mean; tests compare them. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MASK = (1 << 64) - 1
_BATCH, _LMQ = 1, 2


class PageRow(NamedTuple):
    """One row as a page stores it."""

    size: int
    tags_code: int
    store_timestamp: int
    phys: int
    inner_num: int = 1
    parent: int = -1
    parent_queue_offset: int = -1


class PageRun(NamedTuple):
    """What a page needs to know of a run, and the run's rows that lie in the page."""

    kind: int
    min_store_timestamp: int
    min_phys: int
    rows: Sequence[PageRow]


def varint(value: int) -> bytes:
    """``value`` modulo 2^64, seven bits a byte, lowest first."""
    value &= _MASK
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value: int) -> int:
    """Small magnitudes become small numbers; ``value`` wraps at 64 bits first."""
    value = (value + (1 << 63)) % (1 << 64) - (1 << 63)
    return (value << 1) ^ (value >> 63)


def encode_page(runs: Sequence[PageRun]) -> bytes:
    """The page that holds these rows."""
    streams = [bytearray() for _ in range(7)]
    for run in runs:
        size, time, phys, parent = 0, run.min_store_timestamp, run.min_phys, 0
        for row in run.rows:
            streams[0] += varint(zigzag(row.size - size))
            streams[1] += varint(zigzag(row.tags_code))
            streams[2] += varint(zigzag(row.store_timestamp - time))
            streams[3] += varint(zigzag(row.phys - phys))
            size, time, phys = row.size, row.store_timestamp, row.phys + row.size
            if run.kind == _BATCH:
                streams[4] += varint(row.inner_num)
            elif run.kind == _LMQ:
                streams[5] += varint(row.parent)
                streams[6] += varint(zigzag(row.parent_queue_offset - parent))
                parent = row.parent_queue_offset
    return b"".join([*(len(s).to_bytes(4, "little") for s in streams), *streams])


def cut_blocks(
    run_sizes: Sequence[Sequence[int]], block_bytes: int, shared_bytes: int
) -> list[list[tuple[int, int]]]:
    """Every block as (run, record size) of its records, for runs given by their record sizes."""
    blocks: list[list[tuple[int, int]]] = []
    is_open = False
    for run, sizes in enumerate(run_sizes):
        for size in sizes:
            if is_open:
                is_shared = blocks[-1][0][0] != run
                limit = min(block_bytes, shared_bytes) if is_shared else block_bytes
                is_open = sum(taken for _, taken in blocks[-1]) + size <= limit
            if not is_open:
                blocks.append([])
            blocks[-1].append((run, size))
            is_open = True
        if is_open and 2 * sum(taken for _, taken in blocks[-1]) >= shared_bytes:
            is_open = False
    return blocks
