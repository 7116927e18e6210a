"""Reading in a worker process: settings of malloc that keep freed buffers, and fewer garbage collections.

Buffers of megabytes are otherwise mapped and unmapped one by one, and touching fresh pages took a quarter of the CPU
time of a scan. The memory kept is bounded.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rocketmq_tiered.message_table.batches.partition_reader import read_partition
from rocketmq_tiered.message_table.options.columns import Column
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.store_scan import LogRange
from rocketmq_tiered.spark.source.worker_errors import short_trace

if TYPE_CHECKING:
    import pyarrow as pa

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""Numbers of malloc.h."""
ARENAS: Final = 2
KEPT_BYTES: Final = 64 << 20
"""Free memory kept at the end of the heap."""
MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""Larger buffers are still mapped. glibc accepts no higher value."""


def keep_freed_memory() -> None:
    """Apply the settings, in processes that only read partitions. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


_begun = _settled = False


def read_in_worker(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    columns: list[Column],
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """``read_partition`` in a Spark worker, which runs a full garbage collection after every task.

    After the first task, objects of libraries and kernels are frozen: collecting them took longer than a small
    partition.
    """
    global _begun, _settled  # noqa: PLW0603 - state of the process
    if not _begun:
        keep_freed_memory()
        _begun = True
    with short_trace():
        yield from read_partition(part, options, predicate, columns, schema)
    if not _settled:
        gc.collect()
        gc.freeze()
        _settled = True
