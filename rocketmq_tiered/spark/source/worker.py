"""Reading in a worker process: memory that stays, fewer garbage collections, errors without a trace."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rocketmq_tiered.message_table.batches.message_batches import read_partition
from rocketmq_tiered.message_table.options.columns import Column
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.store_scan import LogRange
from rocketmq_tiered.process.allocator import return_freed_memory
from tiered.errors import TieredError

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def short_trace() -> Iterator[None]:
    """While a TieredError leaves this context, or a method that it decorates, in a Python process of Spark, its
    traceback is not printed: the error itself says what is wrong, and Spark would print pages."""
    try:
        yield
    except TieredError:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name.startswith("pyspark."):
            sys.tracebacklimit = 0
        raise


KEPT_BYTES: Final = 64 << 20
"""Free memory kept at the end of the heap."""
MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""Larger buffers are still mapped. glibc accepts no higher value."""
_begun = _settled = False


def read_in_worker(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    columns: list[Column],
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Read one ``part`` of an archive or store in a Spark worker, as Arrow batches with ``columns``.

    A worker runs a full garbage collection after every task. After the first one, objects of libraries and kernels are
    frozen: collecting them took longer than reading a small partition.
    """
    global _begun, _settled  # noqa: PLW0603 - state of the process
    if not _begun:
        return_freed_memory(MMAP_THRESHOLD_BYTES, KEPT_BYTES)
        _begun = True
    with short_trace():
        yield from read_partition(part, options, predicate, columns, schema)
    if not _settled:
        gc.collect()
        gc.freeze()
        _settled = True
