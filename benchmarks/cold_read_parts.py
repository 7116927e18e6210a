"""The parts of a cold read alone: ``python -m benchmarks.cold_read_parts URL`` prints one JSON line.

Ranged GETs of the blocks of every queue, CRC32C, decompression; two threads take pieces one after another and discard
the result. Their rate is the bound for the fetcher. Tails are read beforehand and not counted. Owns the
wiring; the parts are the reader's own.
"""

import argparse
import json
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.machine import drop_from_page_cache
from rocketmq_tiered.cli.arguments import add_archive, settings_of
from rocketmq_tiered.process.loaded_archive import open_for_reading
from tiered.archive.segment_reader import SegmentCache
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.formats.segment_index import BlockSpan, SegmentIndex
from tiered.model.tables import RunKind
from tiered.object_store.interface import ObjectStore

THREADS = 2
PIECE_BYTES = 4 * 1024 * 1024
"""Stored bytes of one GET, as the fetcher cuts long spans."""
SAMPLES = 500


class Piece(NamedTuple):
    """Consecutive blocks of one run."""

    segment: SegmentIndex
    span: BlockSpan


@dataclass
class Work:
    """All blocks of an archive and what they hold."""

    pieces: list[Piece]
    messages: int
    tails: int

    @property
    def stored_bytes(self) -> int:
        """Bytes to fetch."""
        return sum(piece.span.length for piece in self.pieces)

    @property
    def raw_bytes(self) -> int:
        """Message bytes."""
        return sum(piece.span.raw_bytes for piece in self.pieces)


def all_pieces(store: ObjectStore, state: CatalogState, piece_bytes: int = PIECE_BYTES) -> Work:
    """Every visible queue's blocks, each once, in the order a reader of queue after queue meets them."""
    segments = SegmentCache(store, cache_bytes=1 << 30)
    pieces, messages = [], 0
    met: dict[str, set[int]] = {}
    chunk = RunIndex(store).runs_of_queues(state, list(state.visible_queues())).chunk
    for run in chunk.runs[chunk.runs["kind"] != RunKind.LMQ]:
        place = chunk.objects[int(run["object"])]
        key = chunk.object_keys[int(place["key"])]
        index = segments.open(
            key, size_bytes=int(place["size_bytes"]), tail_bytes=int(place["tail_bytes"])
        ).index
        ordinal, rows = int(run["ordinal"]), int(run["rows"])
        first, end = index.block_span(ordinal, 0, rows)[:2]
        known = met.setdefault(key, set())
        while first < end and first in known:  # small runs share blocks: only the ends of a span may be known
            first += 1
        while first < end and end - 1 in known:
            end -= 1
        if first < end:
            span = index.span_of_blocks(ordinal, first, end)
            pieces += [Piece(index, part) for part in index.split_span(ordinal, span, piece_bytes)]
            known.update(range(first, end))
        messages += rows
    return Work(pieces, messages, len(met))


def fetch_and_expand(store: ObjectStore, pieces: deque[Piece]) -> int:
    """One thread: take pieces until there are none; returns raw bytes."""
    raw_bytes = 0
    while True:
        try:
            index, span = pieces.popleft()
        except IndexError:
            return raw_bytes
        stored = store.get_range(index.key, span.offset, span.length)
        raw_bytes += len(index.decode_blocks(span, stored))


def bare_gets(store: ObjectStore, work: Work, samples: int = SAMPLES) -> dict[str, float]:
    """Latency of one ranged GET of a single random block, ms."""
    random = np.random.default_rng(7)
    took = []
    for number in random.integers(0, len(work.pieces), samples).tolist():
        index, span = work.pieces[number]
        block = int(random.integers(span.first_block, span.end_block))
        length = int(index.blocks["stored_bytes"][block])
        offset = span.offset + int(index.blocks["stored_bytes"][span.first_block : block].sum())
        started = time.perf_counter()
        store.get_range(index.key, offset, length)
        took.append((time.perf_counter() - started) * 1000)
    return {f"p{rank}_ms": round(float(np.percentile(took, rank)), 3) for rank in (50, 99)}


def measure(store: ObjectStore, state: CatalogState, drop: Path | None) -> dict[str, object]:
    """Run the parts over the whole archive once, then single GETs; the page cache is dropped before each."""
    work = all_pieces(store, state)
    fetch_and_expand(store, deque(work.pieces[:2]))
    drop_directory(drop)
    pieces = deque(work.pieces)
    with ThreadPoolExecutor(THREADS) as pool:
        cpu, started = time.process_time(), time.perf_counter()
        raw_bytes = sum(pool.map(lambda _: fetch_and_expand(store, pieces), range(THREADS)))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    if raw_bytes != work.raw_bytes:
        raise ValueError(f"{raw_bytes} bytes came, not {work.raw_bytes}")
    drop_directory(drop)
    return {
        "messages": work.messages,
        "wall_s": round(wall_s, 4),
        "cpu_s": round(cpu_s, 4),
        "messages_per_s": round(work.messages / wall_s),
        "mb_per_s": round(raw_bytes / 1e6 / wall_s, 1),
        "cpu_us_per_message": round(cpu_s * 1e6 / work.messages, 4),
        "stored_bytes": work.stored_bytes,
        "raw_bytes": raw_bytes,
        "requests": len(work.pieces),
        "tails": work.tails,
        "bare_get": bare_gets(store, work),
    }


def drop_directory(directory: Path | None) -> None:
    """Let the kernel forget everything below ``directory``."""
    if directory is not None:
        drop_from_page_cache([path for path in directory.rglob("*") if path.is_file()])


def main() -> None:
    """Measure one archive."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_read_parts", description=main.__doc__)
    add_archive(parser)
    parser.add_argument(
        "--drop", type=Path, metavar="DIR", help="forget these files' page cache before reading"
    )
    options = parser.parse_args()
    with open_for_reading(options.url, settings_of(options).settings) as archive:
        print(json.dumps(measure(archive.store, archive.state, options.drop)))


if __name__ == "__main__":
    main()
