"""`tiered compile`: compile the kernels of all verbs into the installation, so that no process has to.

Run by its owner after an installation or upgrade, and when an image is built.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tiered.console import print_lines
from tiered.errors import AccessDeniedError
from tiered.formats import segment
from tiered.formats.page_decoder import PageDecoder
from tiered.kernels import jit, scan
from tiered.kernels.queue_table import QUEUES_FULL, QueueTable
from tiered.kernels.record_columns import RecordColumns
from tiered.kernels.rescan import rescan
from tiered.kernels.split import SplitScratch, split_by_queue
from tiered.kernels.timers import find_timers, same_texts, time_order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: the kernels belong to the installation that runs."""


def execute(options: argparse.Namespace) -> int:
    """Print the directory and the time."""
    began = time.monotonic()
    try:
        with jit.compiled_ahead() as directory:
            for use in _uses():
                use()
    except OSError as error:
        raise AccessDeniedError(
            f"cannot write {error.filename}: {error.strerror}",
            hint="run `tiered compile` as the owner of the installation",
        ) from error
    print_lines(f"compiled into {directory} in {time.monotonic() - began:.0f} s, {_bytes(directory):,} bytes")
    return 0


_NONE = np.zeros(0, np.int64)


def _uses() -> Iterator[Callable[[], object]]:
    yield scan.warm_up
    yield lambda: find_timers(np.zeros(8, np.uint8), _NONE, _NONE, max_delay_ms=0)
    yield lambda: same_texts(0, _NONE, _NONE, _NONE)
    yield lambda: time_order(_NONE)
    yield segment.warm_up
    yield lambda: split_by_queue(np.zeros(1, np.int32), 1, 1, SplitScratch())
    yield lambda: QueueTable().grow(QUEUES_FULL)
    yield PageDecoder().load
    yield _rescan


def _rescan() -> None:
    one = np.zeros(1, np.int64)
    rescan(np.zeros(8, np.uint8), one, np.full(1, 8, np.int32), one, QueueTable(), RecordColumns(1, 1, 1))


def _bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
