"""Cold reads before and after compaction, and its cost: ``python -m benchmarks.compaction --out compaction.jsonl``.

Three archives in a directory: store C in cycles of 64 KiB, 1,000 queues, and the same bytes in 16. Each GET takes 20 ms
longer than the directory does. Queues of C are read one by one, each from an empty cache. The others are read by 16
readers that share a cache: threads, and then tasks of an event loop. They read 16 queues of each archive. Then ``tiered
compact --apply`` runs as a process, and the same queues of C and all queues of the others are read. ``--queues 10000``
has 10 GiB, as many bytes a queue. Owns the figures and their limits.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import fastcrc
import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.archive_targets import FileTarget
from benchmarks.backfill import NAMES, TIERED, run_backfill, verify
from benchmarks.cold_read_ours import Tally, load_kernel, walk, walk_all, walk_in_loop
from benchmarks.machine import ChildRun, run_child
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.stores import PROFILES, StoreProfile, ensure_store
from fetcher.access import ArchiveAccess
from fetcher.archive import Archive
from fetcher.io.request_scheduler import ThreadRangeReader
from fetcher.queries.queue_listing import QueueListing
from rocketmq_tiered.maintenance.compaction_job import planned_rounds
from tiered.archive.rewrite.opened import COPIED_RAW_BYTES_MIN
from tiered.catalog.archives import Archive as ArchivePlace
from tiered.catalog.archives import open_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex, living_runs, referenced_keys
from tiered.catalog.state import CatalogState
from tiered.formats.column_pages import encode_page
from tiered.formats.segment import SHARED_BLOCK_BYTES
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import PAGE_ROWS, TRAILER_BYTES, decode_trailer
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.wrapper import StoreWrapper
from tiered.settings.sections import CompactionSettings, Settings

DELAY_S = 0.02
READERS = 16
SAMPLED = 40
"""Queues of the archive of cycles that are read."""
BEFORE_QUEUES = 16
"""Queues of the other archives that are read before compaction: every object has messages of each."""
QUEUE_MESSAGES = 924
"""Of 1.2 KiB each: 1.1 MB a queue, of which 10,000 have 10.4 GiB."""
READ_BYTES = 4 * MIB
PAST_DAY = ("index.after_backfill=true",)
"""One index file, as of a day that has ended: objects that none covers yet are not joined."""
CYCLE_SETTINGS = ("offload.batch_bytes=65536", *PAST_DAY)
BASE_RSS_BYTES = 64 * MIB
TAILS = 10
SPOOL_BYTES = 512 * MIB
"""Of what iterations need, in a file at a time."""


class DelayedStore(StoreWrapper):
    """Each read takes ``DELAY_S`` longer; those of data objects are counted."""

    def __init__(self, store: ObjectStore, delay_s: float = DELAY_S) -> None:
        super().__init__(store)
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self.gets = self.bytes = 0

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Counted."""
        time.sleep(self._delay_s)
        if key.startswith(("data/", "sets/")):
            with self._lock:
                self.gets += 1
                self.bytes += length
        return super().get_range(key, offset, length)


@dataclass(frozen=True)
class Case:
    """One archive. ``alone``: its queues are read one by one."""

    name: str
    profile: StoreProfile
    settings: tuple[str, ...] = ()
    alone: bool = False


def cases(queues: int) -> list[Case]:
    """The archives. Each queue of the second has as many bytes whatever ``queues`` is."""
    messages = queues * QUEUE_MESSAGES
    return [
        Case("cycles", PROFILES["C"], CYCLE_SETTINGS, alone=True),
        Case("many queues", StoreProfile(f"many{queues}", messages, 1024, queues // 4, 4), PAST_DAY),
        Case("16 queues", StoreProfile(f"few{queues}", messages, 1024, 4, 4), PAST_DAY),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compaction", description=main.__doc__)
    parser.add_argument("--queues", type=int, default=1000, help="10000: the full version, of 10 GiB twice")
    parser.add_argument("--cases", default="cycles,many queues,16 queues")
    parser.add_argument(
        "--memory", default="64,256", help="compaction.memory_bytes in MiB; the last one's result is read"
    )
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/tiered-bench"))
    parser.add_argument("--out", type=Path, default=Path("compaction.jsonl"))
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in cases(options.queues) if case.name in options.cases.split(",")]
    memory = [int(one) for one in options.memory.split(",")]
    return record(options.out, measured(chosen, memory, options.work), summarize, table)


def measured(chosen: Sequence[Case], memory_mib: Sequence[int], work: Path) -> Iterator[Row]:
    """Rows of all cases."""
    for case in chosen:
        store = ensure_store(work, case.profile)
        with FileTarget(work / "compaction-target") as target:
            run_backfill(store, target, work, case.settings)
            directory = work / "compaction-target"
            yield {"case": case.name, "when": "before", **read(directory, case, queues_max=BEFORE_QUEUES)}
            for number, mib in enumerate(memory_mib):
                copy = directory
                if number + 1 < len(memory_mib):
                    copy = work / "compaction-copy"
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(directory, copy)
                yield {"case": case.name, "when": "compaction", **compaction(copy, mib, work)}
                if copy != directory:
                    shutil.rmtree(copy)
            collect = [str(TIERED), "gc", target.url, *NAMES, "--apply", "--grace", "0"]
            run_child(collect, bytecode_cache=work / "pycache")
            verify(target, work)
            yield {"case": case.name, "when": "after", **read(directory, case)}


# -- reads ----------------------------------------------------------------------------------------------------


def read(directory: Path, case: Case, queues_max: int | None = None) -> Row:
    """Read the queues of an archive, at most ``queues_max`` of them, and count."""
    tallies: list[Tally] = []
    gets = byte_count = 0
    place, state = _opened(directory)
    listings = _archive(place, DelayedStore(place.store), state).queues()
    tails = _largest_tails(place.store)
    load_kernel()
    started = time.perf_counter()
    if case.alone:
        chosen = random.Random(1).sample(listings, min(SAMPLED, len(listings)))
        groups = [[one] for one in chosen]
    else:
        chosen = random.Random(1).sample(listings, min(queues_max or len(listings), len(listings)))
        groups = [sorted(chosen, key=lambda listing: listing.key)]  # neighbours share pages of columns
    most = 0.0
    for group in groups:
        delayed = DelayedStore(place.store)
        with _archive(place, delayed, state) as archive:
            queues = deque(group)
            tallies += [walk(archive, queues)] if case.alone else walk_all(archive, queues, READERS)
        gets += delayed.gets
        byte_count += delayed.bytes
        most = max(most, delayed.gets / len(group))
    wall_s = time.perf_counter() - started
    messages = sum(tally.messages for tally in tallies)
    record_bytes = sum(tally.record_bytes for tally in tallies)
    count = sum(len(group) for group in groups)
    return {
        "objects": sum(1 for prefix in ("data/", "sets/") for _ in place.store.list(prefix)),
        "queues": count,
        "messages": messages,
        "record_bytes": record_bytes,
        "wall_s": round(wall_s, 3),
        "messages_per_s": round(messages / wall_s),
        "gets": gets,
        "get_bytes": byte_count,
        "gets_a_queue": round(gets / count, 3),
        "gets_a_queue_max": round(most, 3),
        "stored_bytes": sum(listing.bytes for listing in listings),
        "largest_tail_bytes": max(tails),
        "messages_per_s_in_loop": None if case.alone else round(_rate_in_loop(place, state, groups[0])),
    }


def _rate_in_loop(place: ArchivePlace, state: CatalogState, listings: Sequence[QueueListing]) -> float:
    """Messages a second of tasks of one event loop, with an empty cache."""
    with _archive(place, DelayedStore(place.store), state) as archive:
        started = time.perf_counter()
        tallies = walk_in_loop(archive, deque(listings), READERS)
        return sum(tally.messages for tally in tallies) / (time.perf_counter() - started)


def _largest_tails(store: ObjectStore) -> list[int]:
    """Tail bytes of the largest data objects."""
    infos = [info for prefix in ("data/", "sets/") for info in store.list(prefix)]
    largest = sorted(infos, key=lambda info: -info.size_bytes)[:TAILS]
    tails = [store.get_range(info.key, info.size_bytes - TRAILER_BYTES, TRAILER_BYTES) for info in largest]
    return [
        info.size_bytes - decode_trailer(tail, info.size_bytes, source=info.key).tail_offset
        for info, tail in zip(largest, tails, strict=True)
    ]


def _opened(directory: Path) -> tuple[ArchivePlace, CatalogState]:
    place = open_archive(FileStore(directory), *NAMES[1::2])
    return place, load(place.store)


def _archive(place: ArchivePlace, store: DelayedStore, state: CatalogState) -> Archive:
    settings = Settings()
    slow = ArchivePlace(place.cluster, place.broker, store)
    fetch = settings.fetch
    threads = fetch.user_requests + fetch.prefetch_requests + fetch.background_requests
    reader = ThreadRangeReader(store, threads)
    return Archive(ArchiveAccess("file://", store, slow, state, reader, settings))


# -- compaction -----------------------------------------------------------------------------------------------


def compaction(directory: Path, memory_mib: int, work: Path) -> Row:
    """One `tiered compact --apply` and what it would take at least."""
    place, state = _opened(directory)
    counting = DelayedStore(place.store, 0.0)
    own = CompactionSettings(min_age_ms=0, memory_bytes=memory_mib * MIB)
    rounds = list(planned_rounds(counting, state, Settings(compaction=own)))
    # Rounds of a large sequence read the same sources.
    iterations = max((round(len(one.plan.iterations) / one.range.share) for one in rounds), default=0)
    del rounds
    sizes = {info.key: info.size_bytes for prefix in ("data/", "sets/") for info in place.store.list(prefix)}
    command = [
        str(TIERED),
        "compact",
        f"file://{directory}",
        *NAMES,
        "--json",
        "--older-than",
        "0",
        "--spool",
        str(work),
        f"--set=compaction.memory_bytes={memory_mib}MiB",
    ]
    planning = run_child(command, bytecode_cache=work / "pycache")
    child = run_child([*command, "--apply"], bytecode_cache=work / "pycache")
    if child.exit_code != 0:
        raise RuntimeError(f"compaction failed: {child.output[-2000:]}")
    document = json.loads(child.output[child.output.index("{") :])
    pages = living_runs(RunIndex(place.store), load(place.store))
    living = {key for page in pages for key in referenced_keys(page.chunk)}
    sources = [(key, size) for key, size in sizes.items() if key not in living]
    done, archived_bytes = document["done"], sum(size for _, size in sources)
    parts_s, found_bytes = parts(place.store, sources, work)
    parts_s += planning.cpu_s
    spooled_bytes = found_bytes if iterations > 1 else 0
    files_s = file_parts(work, spooled_bytes, done["bytesSent"] + done["bytesCopied"])
    limit = len(sources) * max(1, iterations) + archived_bytes / (16 * MIB)
    return {
        "memory_mib": memory_mib,
        "planning_data_gets": counting.gets,
        "sources": len(sources),
        "iterations": iterations,
        "archived_bytes": archived_bytes,
        "new_objects": document["newObjects"],
        "gets": done["gets"],
        "gets_limit": int(limit),
        "bytes_read": done["bytesRead"],
        "bytes_sent": done["bytesSent"],
        "bytes_copied": done["bytesCopied"],
        "forecast_reader_gets": document["readerGets"],
        "forecast_new_reader_gets": document["newReaderGets"],
        **_process(child),
        "parts_cpu_s": round(parts_s, 3),
        "files_cpu_s": round(files_s, 3),
        "of_parts": round((parts_s + files_s) / child.cpu_s, 3),
        "of_parts_without_files": round(parts_s / child.cpu_s, 3),
        "mib_per_s": round(document["messageBytes"] / MIB / child.wall_s, 1),
    }


def _process(child: ChildRun) -> Row:
    return {
        "wall_s": round(child.wall_s, 3),
        "cpu_s": round(child.cpu_s, 3),
        "peak_rss_bytes": child.peak_rss_bytes,
        "others_cores": round(child.others_cores, 2),
    }


def parts(store: ObjectStore, sources: Sequence[tuple[str, int]], work: Path) -> tuple[float, int]:
    """CPU seconds of what has to be done with each source, but for files: one GET, opening, columns, keys, checks;
    decoding and packing of blocks of several runs or of less than a block's half; encoding of columns; writing. And
    the bytes that iterations need: records of these blocks, others as they are stored."""
    decompressor, compressor = zstandard.ZstdDecompressor(), zstandard.ZstdCompressor(level=1)
    started = time.process_time()
    with (work / "parts").open("wb") as out:
        raw: list[bytes] = []
        size = rows = found_bytes = 0
        columns: list[tuple[NDArray[Any], ...]] = []
        for key, size_bytes in sources:
            data = memoryview(store.get_range(key, 0, size_bytes))
            index = SegmentIndex(key, size_bytes, bytes(data))
            fastcrc.crc32.iscsi(data)
            offset, length = index.key_span
            index.decode_keys(data[offset : offset + length])
            columns.append(index.stored_columns(0, int(index.first_row[-1])))
            rows += len(columns[-1][0])
            if rows >= PAGE_ROWS:
                _encode_columns(columns, compressor, out)
                columns, rows = [], 0
            ends = np.cumsum(index.blocks["stored_bytes"], dtype=np.int64) + 16
            # A block begins inside a run unless the run has none of its own.
            is_shared = len(index.blocks) < len(index.runs)
            for number, (begin, end) in enumerate(pairwise([16, *ends.tolist()])):
                row = index.blocks[number]
                if is_shared or int(row["raw_bytes"]) < COPIED_RAW_BYTES_MIN:
                    block = bytes(data[begin:end])
                    raw.append(decompressor.decompress(block) if int(row["codec"]) else block)
                    size += len(raw[-1])
                    found_bytes += len(raw[-1])
                else:
                    out.write(data[begin:end])
                    found_bytes += end - begin
                if size >= SHARED_BLOCK_BYTES:
                    out.write(compressor.compress(b"".join(raw)))
                    raw, size = [], 0
        out.flush()
    seconds = time.process_time() - started
    (work / "parts").unlink()
    return seconds, found_bytes


def file_parts(work: Path, spooled_bytes: int, put_bytes: int) -> float:
    """CPU seconds of files alone: what iterations need is written and read once, as much at a time as a round of
    64 MiB has, and the outputs are copied into the store, a directory."""
    piece, target = bytes(MIB), bytearray(MIB)
    first, second = work / "parts", work / "parts-copy"
    with first.open("wb+", buffering=0) as file, second.open("wb", buffering=0) as copy:
        started = time.process_time()
        for begin in range(0, spooled_bytes, SPOOL_BYTES):
            count = -(-min(SPOOL_BYTES, spooled_bytes - begin) // MIB)
            for _ in range(count):
                file.write(piece)
            file.seek(0)
            for _ in range(count):
                file.readinto(target)
            file.seek(0)
            file.truncate()
        seconds = time.process_time() - started
        for _ in range(-(-put_bytes // MIB)):
            file.write(piece)
        started, at = time.process_time(), 0
        while at < put_bytes:
            at += os.copy_file_range(file.fileno(), copy.fileno(), min(16 * MIB, put_bytes - at), at, at)
        os.fsync(copy.fileno())
        seconds += time.process_time() - started
    first.unlink()
    second.unlink()
    return seconds


def _encode_columns(
    columns: Sequence[tuple[NDArray[Any], ...]], compressor: zstandard.ZstdCompressor, out: BinaryIO
) -> None:
    joined = [np.concatenate(one) for one in zip(*columns, strict=True)]
    for first in range(0, len(joined[0]), PAGE_ROWS):
        page = [column[first : first + PAGE_ROWS] for column in joined]
        begin, zeros = np.array([0, len(page[0])]), np.zeros(1, np.int64)
        out.write(compressor.compress(encode_page(begin, np.zeros(1, np.int32), zeros, zeros, *page)))


# -- limits ---------------------------------------------------------------------------------------------------


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Figures with their limits, by case."""
    found: list[Row] = []
    reads = {(row["case"], row["when"]): row for row in rows if row["when"] != "compaction"}
    for case in dict.fromkeys(row["case"] for row in rows):
        before, after = reads[case, "before"], reads[case, "after"]
        mine = [row for row in rows if row["case"] == case and row["when"] == "compaction"]
        average = after["stored_bytes"] / max(1, after["queues"])
        checks = {
            "GETs a queue": (after["gets_a_queue_max"], 2 + math.ceil(average / READ_BYTES)),
            "bytes fetched, of delivered": (after["get_bytes"] / after["record_bytes"], 1.3),
            "GETs to plan": (max(row["planning_data_gets"] for row in mine), 0),
        }
        if any(row["sources"] for row in mine):
            checks |= _costs(mine)
        if case == "cycles":
            checks["objects after, share"] = (after["objects"] / before["objects"], 0.1)
            checks["GETs after, share of before"] = (after["gets"] / before["gets"], 1 / 50)
        if case == "many queues" and ("16 queues", "after") in reads:
            few = reads["16 queues", "after"]
            for name, rate in (("threads", "messages_per_s"), ("event loop", "messages_per_s_in_loop")):
                checks[f"times as slow as 16 queues, {name}"] = (few[rate] / after[rate], 1.5)
        figures = {name: {"figure": figure, "limit": limit} for name, (figure, limit) in checks.items()}
        missed = [name for name, (figure, limit) in checks.items() if figure > limit]
        found.append({"name": "compaction", "case": case, "figures": figures, "missed": missed})
    return found


def _costs(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Of compactions that had something to do."""
    return {
        "GETs of level 1, share of the limit": (max(row["gets"] / row["gets_limit"] for row in rows), 1.0),
        "bytes written, share of archived": (
            max(row["bytes_sent"] / row["archived_bytes"] for row in rows),
            2.0,
        ),
        "RSS above memory, MiB": (
            max(row["peak_rss_bytes"] / MIB - row["memory_mib"] for row in rows),
            BASE_RSS_BYTES / MIB,
        ),
        "CPU, times that of the parts": (1 / max(row["of_parts"] for row in rows), 1 / 0.6),
    }


def table(summaries: Sequence[Row]) -> str:
    """For people."""
    lines = []
    for summary in summaries:
        lines.append(summary["case"])
        for name, found in summary["figures"].items():
            mark = "MISSED" if name in summary["missed"] else "ok"
            lines.append(f"  {name:40} {found['figure']:>12,.3f} of {found['limit']:>10,.3f}  {mark}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
