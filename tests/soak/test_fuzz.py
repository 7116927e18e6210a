"""Decoders and bytes that are not what they should be: a typed error or the truth, in bounded memory.

A slice runs with the fast tests, the same cases each time; `make soak` runs as many as are claimed, other ones each
time. A failure prints the case.

What is fuzzed: each decoder with real bytes of its format, and the rule that a success must be the truth.

Does not own how bytes are changed (fuzz_mutations.py).
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fetcher.io.waiting import run_sync
from tests.formats.golden_archive import GOLDEN
from tests.soak.fuzz_mutations import Mutation, changed, changed_json
from tests.soak.results import knob, limits, publish
from tiered.archive.index.footer import decode_tail, shape_of
from tiered.archive.index.layout import Shape
from tiered.archive.index.lookup import Wanted, find_items
from tiered.archive.index.merge import file_items
from tiered.archive.index.rocketmq_index_file import indexed_message
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import COMMIT_KIND, ROOT_KIND, decode_commit, decode_root
from tiered.catalog.deletions import LIST_KIND, DeletionList, Reason, decode_list, read_list
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.pages import PAGE_KIND, RunIndex, decode_catalog_page
from tiered.errors import TieredError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.fastjson import loads
from tiered.formats.record import SYS_INNER_BATCH, Record, decode_record, record_to_json
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES, decode_trailer
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import FrameDecoder, RemotingCommand, SerializeType, encode

FAST_CASES = 40
CASES = knob("FUZZ_CASES", 130_000)
STORE = "F"
NUMBER = st.one_of(st.integers(0, 255), st.integers(0, (1 << 64) - 1))
MUTATIONS = st.lists(st.builds(Mutation, st.integers(0, 7), NUMBER, NUMBER), min_size=1, max_size=5)
MEMORY_BYTES = 4 << 20
"""For inputs of some kilobytes."""
MEASURED_EVERY = 8
"""Tracing memory makes everything many times slower."""


class Fuzzer:
    """Runs cases of one subject and counts what came of them."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._truths: list[Any] = []
        self._count = 0
        self.outcomes: Counter[str] = Counter()
        self.peak_bytes = 0

    def run(self, cases: int, *, same_each_time: bool) -> None:
        """So many; raises what a case shows."""
        phases = [Phase.explicit, Phase.generate, Phase.shrink]

        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=same_each_time,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, len(self._subject.samples) - 1), MUTATIONS)
        def check(number: int, mutations: list[Mutation]) -> None:
            self._check(number, mutations)

        check()

    def _check(self, number: int, mutations: list[Mutation]) -> None:
        subject = self._subject
        data = subject.change(subject.samples, number, mutations)
        if subject.is_checked and not self._truths:
            self._truths = [subject.decode(*sample) for sample in enumerate(subject.samples)]
        self._count += 1
        is_measured = self._count % MEASURED_EVERY == 0
        if is_measured:
            tracemalloc.start()
        try:
            found = subject.decode(number, data)
        except TieredError as error:
            self.outcomes[type(error).__name__] += 1
        else:
            self.outcomes["decoded"] += 1
            # Of a whole other object it says that object's truth: what belongs where is the catalog's to say.
            assert not subject.is_checked or found in self._truths, "damaged bytes were believed"
        finally:
            peak_bytes = tracemalloc.get_traced_memory()[1] if is_measured else 0
            tracemalloc.stop()
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        assert peak_bytes <= MEMORY_BYTES, f"{peak_bytes} bytes for {len(data)}"


NAMES = [
    "container",
    "container, resealed",
    "commit",
    "commit, resealed",
    "page, resealed",
    "root page, resealed",
    "deletion list, resealed",
    "catalog, resealed",
    "catalog of every commit, resealed",
    "segment",
    "index file",
    "record",
    "fastjson",
    "remoting frame",
    "remoting frame, odd header",
]
SHARE = -(-CASES // len(NAMES))


def fuzzer_of(name: str, real_store: Callable[[str], Path]) -> Fuzzer:
    """The subject with this name."""
    (subject,) = [found for found in subjects(real_store(STORE) / "store") if found.name == name]
    return Fuzzer(subject)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes(name: str, real_store: Callable[[str], Path]) -> None:
    fuzzer = fuzzer_of(name, real_store)
    fuzzer.run(FAST_CASES, same_each_time=True)
    assert fuzzer.outcomes.total() >= FAST_CASES


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NAMES)
def test_very_many_damaged_bytes(name: str, real_store: Callable[[str], Path]) -> None:
    began_s = time.monotonic()
    fuzzer = fuzzer_of(name, real_store)
    fuzzer.run(SHARE, same_each_time=False)
    cases, decoded = fuzzer.outcomes.total(), fuzzer.outcomes["decoded"]
    publish(
        f"damaged bytes, {name}",
        missed=limits(enough_cases=cases >= SHARE, some_were_refused=decoded < cases),
        cases=cases,
        decoded=decoded,
        refused=cases - decoded,
        peak_kib=fuzzer.peak_bytes >> 10,
        seconds=round(time.monotonic() - began_s),
    )


TABLE_KINDS = (COMMIT_KIND, PAGE_KIND, ROOT_KIND, LIST_KIND)
ARCHIVE, CATALOG = GOLDEN / "1.0" / "archive", GOLDEN / "1.0" / "catalog"
"""Of commits of every kind, with floors, deletion lists and kept roots; without data."""


@dataclass(frozen=True)
class Subject:
    """A decoder. ``decode`` raises, or returns what it found; for ``is_checked`` formats that must be what one of the
    samples says. ``change``: how bytes are changed, plainly unless said otherwise."""

    name: str
    samples: Sequence[bytes]
    decode: Callable[[int, bytes], Any]
    is_checked: bool = False
    change: Callable[[Sequence[bytes], int, Sequence[Mutation]], bytes] = changed


def subjects(store: Path) -> list[Subject]:
    """All of them; ``store`` is a real broker's store directory with small index files."""
    records = _records(store)
    documents = [path.read_bytes() for path in sorted((store / "config").glob("*.json"))]
    frames = _frames(documents)
    segments = [data for _, data in _segments()]
    return [
        Subject("container", _containers(), _decode_container, True),
        Subject("container, resealed", _containers(), _decode_container, change=_resealed),
        Subject("commit", [*_commit_objects(ARCHIVE), *_commit_objects(CATALOG)], _decode_commit, True),
        Subject("commit, resealed", _commits(), _decode_commit, change=_resealed),
        Subject("page, resealed", _pages(PAGE_KIND), _decode_page, change=_resealed),
        Subject("root page, resealed", _pages(ROOT_KIND), _decode_root, change=_resealed),
        Subject("deletion list, resealed", _pages(LIST_KIND), _decode_list, change=_resealed),
        Subject("catalog, resealed", _commit_objects(ARCHIVE), _load_archive, change=_resealed_commit),
        Subject(
            "catalog of every commit, resealed",
            _commit_objects(CATALOG),
            _load_catalog,
            change=_resealed_commit,
        ),
        Subject("segment", segments, _decode_segment, True),
        Subject("index file", [data for _, data in _indexes()], _decode_index, True),
        Subject("record", records, _decode_record),
        Subject("fastjson", documents, lambda _, data: loads(data)),
        Subject("remoting frame", frames, _decode_frames),
        Subject("remoting frame, odd header", [_HEADER], _decode_frames, change=_odd_header),
    ]


# -- containers -------------------------------------------------------------------------------------------------


@cache
def _commit_objects(directory: Path) -> list[bytes]:
    store = FileStore(directory)
    return [store.get(info.key) for info in store.list("catalog/")]


def _commits() -> list[bytes]:
    return [data for directory in (ARCHIVE, CATALOG) for data in _commit_objects(directory)]


@cache
def _pages(kind: bytes) -> list[bytes]:
    """All pages of a kind that commits name."""
    found: list[bytes] = []
    for directory in (ARCHIVE, CATALOG):
        store = FileStore(directory)
        drafts = [decode_commit(data, source="sample").draft for data in _commit_objects(directory)]
        keys = {
            key
            for draft in drafts
            for key in (
                draft.pages.root.key,
                *(page.key for page in (*draft.pages.added, *draft.deletions.added)),
            )
            if key
        }
        found += [data for data in (read_page_bytes(store, key) for key in sorted(keys)) if data[:8] == kind]
    return found


@cache
def _containers() -> list[bytes]:
    return [*_commits(), *_pages(PAGE_KIND), *_pages(ROOT_KIND), *_pages(LIST_KIND)]


def _comparable(container: Any) -> Any:
    return container.header, {name: table.tolist() for name, table in container.tables.items()}


def _decode_container(_: int, data: bytes) -> Any:
    return _comparable(
        decode_container(data, data[:8] if data[:8] in TABLE_KINDS else COMMIT_KIND, source="x")
    )


def _resealed(samples: Sequence[bytes], number: int, mutations: Sequence[Mutation]) -> bytes:
    """Lies behind right checksums: the header's JSON or a table's bytes are changed, and sealed again."""
    sample = samples[number]
    container = decode_container(sample, sample[:8], source="sample")
    header, tables = container.header, dict(container.tables)
    plain = [mutation for mutation in mutations if mutation.kind % 2]
    header = changed_json(header, [mutation for mutation in mutations if mutation.kind % 2 == 0])
    for mutation in plain:
        name = sorted(tables)[mutation.place % len(tables)]
        raw = tables[name].tobytes()
        if raw:
            bent = changed([raw], 0, [mutation])[: len(raw)].ljust(len(raw), b"\xff")
            rows = np.frombuffer(bent, tables[name].dtype)
            tables[name] = rows[: len(rows) - mutation.value % 2]
    return encode_container(sample[:8], header, tables, is_packed=bool(sample[12] & 2))


def _resealed_commit(samples: Sequence[bytes], number: int, mutations: Sequence[Mutation]) -> bytes:
    """The same for a commit."""
    return _resealed([samples[number]], 0, mutations)


def _decode_commit(_: int, data: bytes) -> Any:
    return decode_commit(data, source="x").version


def _decode_page(_: int, data: bytes) -> Any:
    return decode_catalog_page(data, source="x").nbytes


def _decode_root(_: int, data: bytes) -> Any:
    return decode_root(data, source="x")


def _decode_list(_: int, data: bytes) -> Any:
    return decode_list(data, DeletionList("k", Reason.EXPIRED, 3, 1, 0, 0, len(data)), source="x")


def _load_archive(number: int, data: bytes) -> Any:
    return _loaded(ARCHIVE, number, data)


def _load_catalog(number: int, data: bytes) -> Any:
    return _loaded(CATALOG, number, data)


def _loaded(directory: Path, number: int, data: bytes) -> Any:
    """The whole catalog with one commit replaced, read as readers and gc do: every queue's runs and gaps, and every
    deletion list."""
    whole = FileStore(directory)
    store = MemoryStore()
    for place, info in enumerate(whole.list("catalog/")):
        store.put_if_absent(info.key, [data if place == number else whole.get(info.key)])
    for prefix in ("pages/", "state/"):
        for info in whole.list(prefix):
            store.put_if_absent(info.key, [whole.get(info.key)])
    state = load(store)
    for key, _ in state.queues():
        state.gaps_of(key)
        RunIndex(store).runs_of(state, key)
    for listed in state.deletion_lists:
        read_list(store, listed)
    return state.version


# -- segments and index files -----------------------------------------------------------------------------------


@cache
def _segments() -> list[tuple[str, bytes]]:
    store = FileStore(ARCHIVE)
    infos = [*store.list("data/"), *store.list("sets/")]
    return [(info.key, store.get(info.key)) for info in infos]


def _decode_segment(number: int, data: bytes) -> Any:
    key, whole = _segments()[number]
    # The catalog tells sizes: a reader asks for the tail they imply.
    tail_offset = decode_trailer(whole, len(whole), source=key).tail_offset
    if len(data) > TRAILER_BYTES and len(data) % 2:
        index = SegmentIndex(key, len(data), data[min(tail_offset, len(data) - TRAILER_BYTES) :])
    else:
        index = SegmentIndex(key, len(whole), data[tail_offset:])
    found: list[Any] = []
    for run in range(len(index)):
        rows = index.row_columns(run)
        found.append([getattr(rows, name).tolist() for name in rows.__dataclass_fields__])
        if int(index.runs["kind"][run]) != RunKind.LMQ:
            span = index.block_span(run, 0, len(rows.phys))
            found.append(index.decode_blocks(span, data[span.offset : span.offset + span.length]).tobytes())
    offset, length = index.key_span
    keys = index.decode_keys(data[offset : offset + length])
    return [*found, keys.counts.tolist(), keys.hashes.tolist()]


@cache
def _indexes() -> list[tuple[Shape, bytes]]:
    """Index files that the golden catalog names, by its word."""
    store = FileStore(ARCHIVE)
    return [(shape_of(ref), store.get(ref.key)) for ref in load(store).indexes]


def _decode_index(number: int, data: bytes) -> Any:
    shape, whole = _indexes()[number]

    def read_now(key: str, offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    async def read(key: str, offset: int, length: int) -> bytes:
        return read_now(key, offset, length)

    everything = [
        chunk.tolist()
        for chunk in file_items(
            lambda _, offset, length: whole[offset : offset + length], shape, pages_at_once=8
        )
    ]
    hashes = sorted({item[0] for chunk in everything for item in chunk})[:8]
    found = [
        run_sync(find_items(read, shape, Wanted(hash_, 0, 1 << 62, 64))).items.tolist() for hash_ in hashes
    ]
    meta, covered = decode_tail(shape, read_now(shape.key, *shape.tail_range))
    return found, meta, covered.keys, covered.objects.tolist()


# -- the broker's formats ---------------------------------------------------------------------------------------


@cache
def _records(store: Path) -> list[bytes]:
    log = CommitLog([store / "commitlog"])
    found, phys = [], log.min_phys
    while len(found) < 150 and (size := log.record_size_at(phys)) is not None:
        found.append(log.read(phys, size))
        phys += size
    return found


def _shown(record: Record) -> Any:
    queue = QueueKey(record.topic, record.queue_id, 0)
    is_batch = bool(record.sys_flag & SYS_INNER_BATCH)
    return record_to_json(record, queue=queue, queue_offset=record.queue_offset, is_own_offset=is_batch)


def _decode_record(_: int, data: bytes) -> Any:
    record = decode_record(data)
    assert indexed_message(record, with_tags=True).phys == record.physical_offset
    return _shown(record), record.body(1 << 20)


def _frames(documents: Sequence[bytes]) -> list[bytes]:
    found = []
    for number, body in enumerate([b"", b"body", *documents]):
        for kind in SerializeType:
            fields = {"topic": "t_keys", "queueId": str(number), "größe": "日志"}
            command = RemotingCommand(
                11 + number, number, ext_fields=fields, body=body[:2000], remark="r", serialize_type=kind
            )
            found.append(encode(command))
    return found


_HEADER = orjson.dumps(
    {
        "code": 11,
        "flag": 0,
        "language": "JAVA",
        "opaque": 7,
        "serializeTypeCurrentRPC": "JSON",
        "version": 409,
        "remark": "r",
        "extFields": {"topic": "t", "queueId": "3", "commitOffset": 5},
    }
)


def _odd_header(samples: Sequence[bytes], number: int, mutations: Sequence[Mutation]) -> bytes:
    """A whole frame whose header is JSON, but not what a header is."""
    document = changed_json(orjson.loads(samples[number]), mutations)
    header = json.dumps(document).replace("Infinity", "1e999").encode("utf-8", "replace")
    return struct.pack(">iI", 4 + len(header), len(header)) + header


def _decode_frames(_: int, data: bytes) -> Any:
    decoder = FrameDecoder(frame_bytes_max=1 << 16)
    half = len(data) // 2
    return len([*decoder.feed(data[:half]), *decoder.feed(data[half:])])
