"""Plain-Python equivalents of the segment kernels and of the page decoder, which their tests compare with."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MASK = (1 << 64) - 1
_BATCH, _LMQ, _SPARSE = 1, 2, 3


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
            if run.kind in (_BATCH, _SPARSE):
                streams[4] += varint(row.inner_num)
            elif run.kind == _LMQ:
                streams[5] += varint(row.parent)
                streams[6] += varint(zigzag(row.parent_queue_offset - parent))
                parent = row.parent_queue_offset
    return b"".join([*(len(s).to_bytes(4, "little") for s in streams), *streams])


def decode_page(data: bytes, runs: Sequence[tuple[PageRun, int]]) -> list[PageRow] | None:
    """The rows of a page that holds so many rows of each run; None for a malformed page."""
    lengths = [int.from_bytes(data[4 * stream : 4 * stream + 4], "little") for stream in range(7)]
    if len(data) < 28 or 28 + sum(lengths) != len(data):
        return None
    ends = [28 + sum(lengths[: stream + 1]) for stream in range(7)]
    streams = [_integers(data[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    rows: list[PageRow] = []
    try:
        for run, count in runs:
            size, time, phys, parent = 0, run.min_store_timestamp, run.min_phys, 0
            for _ in range(count):
                size += _unzigzag(next(streams[0]))
                tags_code = _unzigzag(next(streams[1]))
                time = _wrapped(time + _unzigzag(next(streams[2])))
                place = _wrapped(phys + _unzigzag(next(streams[3])))
                phys = place + size
                inner = next(streams[4]) if run.kind in (_BATCH, _SPARSE) else 1
                row = PageRow(size, tags_code, time, place, inner)
                if run.kind == _LMQ:
                    row = row._replace(parent=next(streams[5]))
                    parent = _wrapped(parent + _unzigzag(next(streams[6])))
                    row = row._replace(parent_queue_offset=parent)
                if not 0 < size < 1 << 31 or not 0 < inner < 1 << 31 or row.parent >= 1 << 31:
                    return None
                rows.append(row)
        return rows if all(next(stream, None) is None for stream in streams) else None
    except (StopIteration, ValueError):
        return None


def _integers(stream: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in stream:
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise ValueError("more than ten bytes")
        if byte < 0x80:
            yield value & _MASK
            value = shift = 0
    if shift:
        raise ValueError("ends inside an integer")


def _unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


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
