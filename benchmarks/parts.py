"""The parts of the write path alone: ``python -m benchmarks.parts STORE OUTPUT`` prints one JSON line.

Read, scan, split, gather, compress the blocks an archive would hold, checksum them, write them with the key
hashes, fsync. Each thread takes whole cycles without order or catalog: the rate of two
threads is the bound for the archiver. Owns the wiring; the parts are the archiver's own.
"""

import argparse
import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.machine import log_files
from tiered.formats.segment import PIECE_BYTES, SHARED_BLOCK_BYTES
from tiered.kernels.gather import cut_blocks, gather_records
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.record_columns import RecordColumns, StopReason
from tiered.kernels.scan import scan_log
from tiered.kernels.split import SplitScratch, split_by_queue
from tiered.object_store.interface import Buffer, ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import ObjectStoreSettings, OffloadSettings

THREADS = 2
PARTS = ("read", "scan", "split", "gather", "compress", "checksum", "write")


@dataclass(frozen=True)
class LogRange:
    """Whole records of one file."""

    path: Path
    file_begin_phys: int
    file_end_phys: int
    offset: int
    length: int


@dataclass
class Tally:
    """What one thread did; CPU seconds by part."""

    messages: int = 0
    stored_bytes: int = 0
    blocks: int = 0
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count this thread's CPU under ``name``."""
        before = time.thread_time()
        yield
        self.cpu_s[name] += time.thread_time() - before


class Worker:
    """One thread's buffers, reused from range to range."""

    def __init__(self, settings: OffloadSettings, output: ObjectStore) -> None:
        self._settings, self._output, self._puts = settings, output, 0
        self._arena = np.empty(settings.batch_bytes, np.uint8)
        self._gathered = np.empty(settings.batch_bytes, np.uint8)
        self._columns, self._table, self._scratch = RecordColumns(), QueueTable(), SplitScratch()
        self._compressor = zstandard.ZstdCompressor(level=settings.compression_level)
        self.tally = Tally()

    def run(self, ranges: deque[LogRange]) -> None:
        """Take ranges until there are none."""
        while True:
            try:
                piece = ranges.popleft()
            except IndexError:
                return
            self._do(piece)

    def warm_up(self, piece: LogRange) -> None:
        """Do one range uncounted: kernels compiled, buffers touched."""
        self._do(piece)
        self.tally = Tally()

    def scan(self, piece: LogRange, *, prefix: bool = False) -> int:
        """Read and scan; returns how many bytes are whole records."""
        with self.tally.part("read"), piece.path.open("rb", buffering=0) as file:
            file.seek(piece.offset)
            length = file.readinto(self._arena.data[: piece.length])
        with self.tally.part("scan"):
            self._columns.reset()
            phys = piece.file_begin_phys + piece.offset
            stop = scan_log(
                self._arena,
                0,
                length,
                phys,
                piece.file_end_phys,
                self._table,
                self._columns,
                delay_levels_ms=None,
            )
        if stop.reason == StopReason.INVALID or (not prefix and stop.position != piece.length):
            raise ValueError(f"{piece.path}: {stop}")
        return stop.position

    def _do(self, piece: LogRange) -> None:
        self.scan(piece)
        columns = self._columns
        with self.tally.part("split"):
            split = split_by_queue(columns.queue, columns.rows, len(self._table), self._scratch)
            rows_of_run = _rows_of_runs(columns, split.order)
            position, size = columns.position[split.order], columns.size[split.order]
            blocks = self._cut_blocks(rows_of_run, size)
        stored: list[bytes] = []
        row = first = 0
        ends = np.cumsum(blocks)
        while first < len(blocks):
            before = int(ends[first] - blocks[first])
            last = max(first + 1, int(np.searchsorted(ends, before + PIECE_BYTES, "right")))
            piece_bytes = int(ends[last - 1]) - before
            with self.tally.part("gather"):
                row = gather_records(self._arena, position, size, row, piece_bytes, self._gathered)
            with self.tally.part("compress"):
                stored += self._compress(blocks[first:last])
            first = last
        with self.tally.part("checksum"):
            checksums = [fastcrc.crc32.iscsi(block) for block in stored]
        with self.tally.part("write"):
            self._write(piece, stored)
        self.tally.messages += columns.rows
        self.tally.blocks += len(checksums)

    def _cut_blocks(self, rows_of_run: NDArray[np.int64], size: NDArray[np.int32]) -> NDArray[np.int64]:
        """Raw bytes of every block."""
        first_row = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows_of_run)])
        is_lmq = np.zeros(len(rows_of_run), np.uint8)
        raw_bytes, rows = np.empty(len(size), np.int64), np.empty(len(size), np.uint32)
        of_run = np.zeros(len(rows_of_run), np.uint32)
        limits = self._settings.block_bytes, SHARED_BLOCK_BYTES
        return raw_bytes[: cut_blocks(first_row, is_lmq, size, *limits, rows, raw_bytes, of_run)]

    def _compress(self, blocks: NDArray[np.int64]) -> list[bytes]:
        compress, raw = self._compressor.compress, self._gathered.data
        ends = np.cumsum(blocks).tolist()
        return [compress(raw[begin:end]) for begin, end in pairwise([0, *ends])]

    def _write(self, piece: LogRange, blocks: list[bytes]) -> None:
        keys = self._columns.key_hashes[: self._columns.keys]
        body: list[Buffer] = [*blocks, keys.data.cast("B")]
        self.tally.stored_bytes += sum(map(len, body))
        self._puts += 1
        self._output.put_if_absent(f"{id(self)}-{self._puts}-{piece.file_begin_phys + piece.offset}", body)


def _rows_of_runs(columns: RecordColumns, order: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows of each run of consecutive queue offsets."""
    queue, offset = columns.queue[order], columns.queue_offset[order]
    expected = offset + columns.inner_num[order]
    begins = np.flatnonzero((queue[1:] != queue[:-1]) | (offset[1:] != expected[:-1])) + 1
    return np.diff(np.concatenate([[0], begins, [len(order)]]))


def cut_ranges(store: Path, settings: OffloadSettings, output: ObjectStore) -> deque[LogRange]:
    """The commitlog in pieces of at most one cycle, at record boundaries."""
    scout = Worker(settings, output)
    ranges: deque[LogRange] = deque()
    for path in log_files(store):
        begin, size, offset = int(path.name), path.stat().st_size, 0
        while offset < size:
            wanted = min(settings.batch_bytes, size - offset)
            length = scout.scan(LogRange(path, begin, begin + size, offset, wanted), prefix=True)
            if length == 0:
                break
            ranges.append(LogRange(path, begin, begin + size, offset, length))
            offset += length
    return ranges


def measure(
    store: Path, output: ObjectStore, settings: OffloadSettings, threads: int = THREADS
) -> dict[str, object]:
    """Run all parts over the store once."""
    ranges = cut_ranges(store, settings, output)
    log_bytes, count = sum(piece.length for piece in ranges), len(ranges)
    workers = [Worker(settings, output) for _ in range(threads)]
    for worker in workers:
        worker.warm_up(ranges[0])
    os.sync()
    with ThreadPoolExecutor(threads) as pool:
        cpu, started = time.process_time(), time.perf_counter()
        for running in [pool.submit(worker.run, ranges) for worker in workers]:
            running.result()
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    messages = sum(worker.tally.messages for worker in workers)
    parts = {name: sum(worker.tally.cpu_s[name] for worker in workers) for name in PARTS}
    stored_bytes = sum(worker.tally.stored_bytes for worker in workers)
    return {
        "messages": messages,
        "cycles": count,
        "blocks": sum(worker.tally.blocks for worker in workers),
        "wall_s": round(wall_s, 4),
        "cpu_s": round(cpu_s, 4),
        "messages_per_s": round(messages / wall_s),
        "mb_per_s": round(log_bytes / 1e6 / wall_s, 1),
        "cpu_us_per_message": round(cpu_s * 1e6 / messages, 4),
        "stored_bytes": stored_bytes,
        "stored_ratio": round(log_bytes / stored_bytes, 3),
        "thread_cpu_s": {name: round(value, 4) for name, value in parts.items()},
    }


def main() -> None:
    """Measure one store."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=main.__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("url", help="where the objects are put: file:// or s3://")
    parser.add_argument("--endpoint-url", default="")
    parser.add_argument("--region", default="")
    options = parser.parse_args()
    place = ObjectStoreSettings(endpoint_url=options.endpoint_url, region=options.region)
    print(json.dumps(measure(options.store, open_store(options.url, StoreOptions(place)), OffloadSettings())))


if __name__ == "__main__":
    main()
