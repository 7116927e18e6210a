"""`tiered compile`: compile the kernels of all verbs into the installation, so that no process has to.

Run by its owner after an installation or upgrade, and when an image is built.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tiered.console import print_lines
from tiered.errors import AccessDeniedError
from tiered.formats import byte_planes, segment
from tiered.formats.page_decoder import PageDecoder
from tiered.kernels import jit, scan
from tiered.kernels.log_records import (
    HEAD_BYTES,
    end_of_records,
    next_record,
    record_sizes,
    relocate,
    stored_ms_at,
    write_rows,
)
from tiered.kernels.queue_table import QUEUES_FULL, QueueTable
from tiered.kernels.record_columns import RecordColumns
from tiered.kernels.record_fields import copied, message_ids, property_pairs, record_fields, slice_crc32
from tiered.kernels.rescan import rescan
from tiered.kernels.split import SplitScratch, split_by_queue
from tiered.kernels.timers import find_timers, same_texts, time_order
from tiered.model.tables import GAP_DTYPE, QUEUE_DTYPE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the kernels belong to the installation that runs."""


def execute(options: argparse.Namespace) -> int:
    """Compile all kernels (functions that numba compiles) into the installation; print where, and how long it took.
    Raises AccessDeniedError where this user may not write there."""
    began = time.monotonic()
    try:
        with jit.compiled_ahead() as directory:
            for use in _uses():
                use()
    except OSError as error:
        raise AccessDeniedError(
            f"cannot write compiled kernels to {error.filename}: {error.strerror}",
            hint="run `tiered compile` as the user who owns the installation",
        ) from error
    print_lines(f"compiled into {directory} in {time.monotonic() - began:.0f} s, {_bytes(directory):,} bytes")
    return 0


_NONE = np.zeros(0, np.int64)


def _uses() -> Iterator[Callable[[], object]]:
    """Calls that make numba compile each kernel for the types that its real callers pass. Only types count: most of
    the arrays are empty."""
    yield scan.warm_up
    yield lambda: find_timers(np.zeros(8, np.uint8), _NONE, _NONE, max_delay_ms=0)
    yield lambda: same_texts(0, _NONE, _NONE, _NONE)
    yield lambda: time_order(_NONE)
    yield segment.warm_up
    yield lambda: split_by_queue(np.zeros(1, np.int32), 1, 1, SplitScratch())
    yield lambda: byte_planes.decode(byte_planes.encode(np.zeros(1, GAP_DTYPE)), 0, 1, GAP_DTYPE)
    yield _larger_table
    yield PageDecoder().load
    yield _rescan
    yield _message_table
    yield _restored_log


def _rescan() -> None:
    one = np.zeros(1, np.int64)
    rescan(np.zeros(8, np.uint8), one, np.full(1, 8, np.int32), one, QueueTable(), RecordColumns(1, 1, 1))


def _larger_table() -> None:
    table = QueueTable()
    table.ordinals(["topic"], np.zeros(1, QUEUE_DTYPE))
    table.grow(QUEUES_FULL)


def _message_table() -> None:
    for data in (np.zeros(1, np.uint8), np.frombuffer(b"read-only: a type of its own", np.uint8)):
        fields = record_fields(data, _NONE, _NONE, properties=True)
        property_pairs(data, fields)
        message_ids(data, fields)
        copied(data, _NONE, _NONE)
        slice_crc32(data, _NONE, _NONE)


def _restored_log() -> None:
    """Make numba compile the kernels of `tiered restore`, by calls over a log without records."""
    data, sizes = np.zeros(8 * HEAD_BYTES, np.uint8), np.zeros(0, np.int32)
    address, position = data.ctypes.data, 0
    write_rows(0, address, _NONE, sizes, _NONE, position)
    end_of_records(address, len(data), position, position)
    next_record(address, len(data), position, position)
    stored_ms_at(address, position)
    record_sizes(address, len(data), sizes)
    relocate(address, _NONE, sizes, _NONE)


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
