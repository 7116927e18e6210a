"""Column pages without a compiler: the same result as ``columns.decode_page`` by whole-array arithmetic.

Loading numba costs a third of a second and more, a page of 4,096 rows here half a millisecond: a command that looks at
a few pages and ends is better served by this one. Owns the choice between the two (``PageDecoder``) and the arithmetic;
the coding is described in columns.py.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.columns import LENGTHS_BYTES, STREAMS, VARINT_BYTES_MAX, decode_page

logger = logging.getLogger(__name__)

PAGES_WITHOUT_KERNEL = 512
"""About as many take as long here as loading the kernel and using it."""
COLUMN_KINDS = (np.int32, np.int64, np.int64, np.int64, np.int32, np.int32, np.int64)
"""Of the arrays a page is decoded into, in their order."""
_I32_MAX = 0x7FFFFFFF
_BATCH, _LMQ = 1, 2
_ONE, _LOW = np.uint64(1), np.uint64(0x7F)


class PageDecoder:
    """Decodes pages, by the kernel once numba is there for other reasons or pages become many.

    The kernel is loaded by a thread of its own, half a second in which pages are decoded without it: a server that
    decodes one on its event loop must not stand still. Who will decode many says so at once (``begin``)."""

    def __init__(self, pages_without_kernel: int = PAGES_WITHOUT_KERNEL) -> None:
        self._left = pages_without_kernel
        self._is_loaded = False
        self.loading: threading.Thread | None = None
        """Loads the kernel, once that was worth it."""

    def __call__(self, data: NDArray[np.uint8], *arguments: Any) -> bool:
        """See ``columns.decode_page``."""
        if self._is_loaded:
            return decode_page(data, *arguments)
        if self.loading is None:
            if self._left > 0 and "numba" not in sys.modules:
                self._left -= 1
            else:
                self.begin()
        return decode_page_vectorized(data, *arguments)

    def begin(self) -> threading.Thread:
        """Have the kernel loaded, by a thread that ends when it is; no wait."""
        if self.loading is None:
            # Never a daemon, which it would be when a daemon begins it: an interpreter that ends takes LLVM down, and a
            # process whose work was done would die compiling.
            self.loading = threading.Thread(target=self._load, name="load-kernel", daemon=False)
            self.loading.start()
        return self.loading

    def _load(self) -> None:
        try:
            decode_page(*_page_of_no_rows())  # decoding is what loads it
        except Exception as error:
            logger.warning("column pages are decoded without the kernel, which does not load: %r", error)
        else:
            self._is_loaded = True


def _page_of_no_rows() -> tuple[Any, ...]:
    """Arguments of the types that pages come with, by which the compiled kernel is found: what is read is read-only."""
    no_longs, no_ints = np.zeros(0, np.int64), np.zeros(0, np.int32)
    columns = [np.empty(0, kind) for kind in COLUMN_KINDS]
    data = np.frombuffer(bytes(LENGTHS_BYTES), np.uint8)
    return data, 0, 0, 0, np.zeros(1, np.int64), no_ints, no_longs, no_longs, *columns


def decode_page_vectorized(
    data: NDArray[np.uint8],
    first: int,
    end: int,
    run: int,
    first_row: NDArray[np.int64],
    kind: NDArray[np.int32],
    min_store_timestamp: NDArray[np.int64],
    min_phys: NDArray[np.int64],
    *columns: NDArray[Any],
) -> bool:
    """As ``columns.decode_page``: fills ``columns`` with rows [first, end), False when the page is not well-formed."""
    size, tags_code, store_timestamp, phys, inner_num, parent, parent_offset = columns
    last_run = int(np.searchsorted(first_row, end, side="left"))
    bounds = np.clip(first_row[run : last_run + 1], first, end) - first
    rows_of_run = np.diff(bounds)
    kinds = np.repeat(kind[run:last_run], rows_of_run)
    is_batch, is_lmq = kinds == _BATCH, kinds == _LMQ
    batches, lmqs = int(is_batch.sum()), int(is_lmq.sum())
    streams = _streams(data, (*(end - first,) * 4, batches, lmqs, lmqs))
    if streams is None:
        return False
    sizes = _sums(_signed(streams[0]), bounds)
    counts, parents = streams[4], streams[5]
    bad_size = (sizes < 1) | (sizes > _I32_MAX)
    if bool(bad_size.any() or ((counts < _ONE) | (counts > _I32_MAX)).any() or (parents > _I32_MAX).any()):
        return False
    size[:], tags_code[:] = sizes, _signed(streams[1])
    store_timestamp[:] = np.repeat(min_store_timestamp[run:last_run], rows_of_run)
    store_timestamp += _sums(_signed(streams[2]), bounds)
    phys[:] = np.repeat(min_phys[run:last_run], rows_of_run) - sizes
    phys += _sums(_signed(streams[3]) + sizes, bounds)
    inner_num[:], parent[:], parent_offset[:] = 1, -1, -1
    inner_num[is_batch], parent[is_lmq] = counts, parents
    if lmqs:
        lmq_bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_lmq)])[bounds]
        # Not np.unique: its first call imports masked arrays, 30 ms that the first reader waits.
        is_first = np.concatenate([np.ones(1, np.bool_), lmq_bounds[1:] > lmq_bounds[:-1]])
        parent_offset[is_lmq] = _sums(_signed(streams[6]), lmq_bounds[is_first])
    return True


def _streams(data: NDArray[np.uint8], counts: tuple[int, ...]) -> list[NDArray[np.uint64]] | None:
    """The integers of every stream, or None unless each holds exactly so many."""
    if len(data) < LENGTHS_BYTES:
        return None
    lengths = data[:LENGTHS_BYTES].view("<u4").astype(np.int64)
    ends = LENGTHS_BYTES + np.cumsum(lengths)
    if int(ends[STREAMS - 1]) != len(data):
        return None
    found = []
    for length, end, count in zip(lengths.tolist(), ends.tolist(), counts, strict=True):
        values = _integers(data[end - length : end], count)
        if values is None:
            return None
        found.append(values)
    return found


def _integers(stream: NDArray[np.uint8], count: int) -> NDArray[np.uint64] | None:
    """Exactly ``count`` integers of 7 bits a byte, lowest first, that fill ``stream``; else None."""
    last = np.flatnonzero(stream < 0x80)
    if len(last) != count or (int(last[-1]) + 1 if count else 0) != len(stream):
        return None
    values = np.zeros(count, np.uint64)
    if count == 0:
        return values
    first = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])
    length = last - first + 1
    longest = int(length.max())
    if longest > VARINT_BYTES_MAX:
        return None
    values |= stream[first] & _LOW
    for place in range(1, longest):
        there = np.flatnonzero(length > place)
        values[there] |= (stream[first[there] + place] & _LOW) << np.uint64(7 * place)
    return values


def _signed(zigzag: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (zigzag >> _ONE).view(np.int64) ^ -(zigzag & _ONE).view(np.int64)


def _sums(values: NDArray[np.int64], bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Running sums that begin anew at every bound; they wrap at 64 bits."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    rows = np.diff(bounds)
    result: NDArray[np.int64] = sums[1:] - np.repeat(sums[bounds[:-1]], rows)
    return result
