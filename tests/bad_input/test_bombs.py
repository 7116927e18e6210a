"""Objects that would take all memory are refused by name, within bounded memory; one that memory does not suffice for
is named too, and the process continues.

Small objects with valid checksums that claim, or expand to, more memory than any real one.
"""

import json
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import fastcrc
import numpy as np
import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fetcher.io.request_scheduler import ThreadRangeReader
from fetcher.queries.source import Place, QuerySource
from rocketmq_tiered.export.export_progress import DIRECTORY, ExportProgress
from rocketmq_tiered.server.groups.group_state import KIND as GROUPS_KIND
from rocketmq_tiered.server.groups.group_state import decode_snapshot
from rocketmq_tiered.server.retries.retry_log import KIND as RETRIES_KIND
from rocketmq_tiered.server.retries.retry_log import decode_object
from tests.archive.uncataloged import open_uncataloged
from tests.fetcher.queries.counted import PlainBlocks
from tests.formats.segment_builder import RowSpec, RunSpec, build, whole
from tests.peak_memory import peak_below
from tests.sweeps import examples
from tiered.archive.index.layout import FOOTER_KIND as INDEX_KIND
from tiered.catalog.catalog_reader import read_commit
from tiered.catalog.commit import COMMIT_KIND, ROOT_KIND, decode_commit, decode_root
from tiered.catalog.deletions import LIST_KIND, DeletionList, Reason, decode_list
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.pages import PAGE_KIND, decode_catalog_page
from tiered.errors import CorruptionError, ObjectTooLargeError, OutOfMemoryError
from tiered.formats import fastjson
from tiered.formats.container import HEADER, decode_container, encode_container
from tiered.formats.keys import catalog_key
from tiered.formats.memory_bound import LARGE, SHORTAGES, SMALL, limit_decoding, memory_contained
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_layout import FOOTER_KIND, TRAILER_BYTES, decode_trailer, encode_trailer
from tiered.formats.state_object import STATE_KIND, decode_state
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore

SOURCE = "an/object"
_LISTED = DeletionList(SOURCE, Reason.EXPIRED, 3, 1, 0, 0, 0)
DECODERS: Mapping[bytes, Callable[[bytes], Any]] = {
    COMMIT_KIND: lambda data: decode_commit(data, source=SOURCE),
    PAGE_KIND: lambda data: decode_catalog_page(data, source=SOURCE),
    ROOT_KIND: lambda data: decode_root(data, source=SOURCE),
    LIST_KIND: lambda data: decode_list(data, _LISTED, source=SOURCE),
    STATE_KIND: lambda data: decode_state(data, "topics", source=SOURCE),
    FOOTER_KIND: lambda data: decode_container(data, FOOTER_KIND, source=SOURCE),
    INDEX_KIND: lambda data: decode_container(data, INDEX_KIND, source=SOURCE),
}


def compressed(payload: bytes) -> bytes:
    """One zstd frame, of a level that is quick."""
    return zstandard.ZstdCompressor(level=1).compress(payload)


def sealed(kind: bytes, stored: bytes) -> bytes:
    """A container around any compressed payload, with right checksums."""
    raw_bytes, crc = zstandard.frame_content_size(stored), fastcrc.crc32.iscsi(stored)
    fields = HEADER.pack(kind, 1, 1, 1, raw_bytes, len(stored), crc, 0)[:-4]
    return fields + fastcrc.crc32.iscsi(fields).to_bytes(4, "little") + stored


def table(name: str, columns: list[tuple[str, str]], rows: int, content: bytes | None = None) -> bytes:
    """A table of zeros. ``rows`` is what it claims."""
    described = json.dumps(columns).encode()
    width = np.dtype(columns).itemsize
    head = struct.pack("<H", len(name)) + name.encode() + struct.pack("<H", len(described)) + described
    return head + struct.pack("<Q", rows) + (bytes(rows * width) if content is None else content)


def payload(header: bytes, *tables: bytes) -> bytes:
    """Of a container."""
    return struct.pack("<I", len(header)) + header + struct.pack("<I", len(tables)) + b"".join(tables)


def nested(piece: bytes, count: int, wrap: tuple[bytes, bytes] = (b'{"topics":[', b"0]}")) -> bytes:
    """A JSON object with ``piece`` many times."""
    return wrap[0] + piece * count + wrap[1]


QUEUES = [("topic", "<u4"), ("queue_id", "<i4"), ("generation", "<u4")]
BOMBS: Mapping[str, Callable[[], bytes]] = {
    "lists": lambda: payload(nested(b"[],", 1_700_000)),
    "objects": lambda: payload(nested(b'{"a":0},', 700_000)),
    "numbers": lambda: payload(nested(b"257,", 3_400_000)),
    "zeros": lambda: payload(b"{}", table("x", [("x", "<i8")], 20_000_000)),
    "queues": lambda: payload(b'{"topics":["t"]}', table("queues", QUEUES, 3_000_000)),
    "a narrow table": lambda: payload(
        b'{"topics":["t"],"document":{},"name":"topics"}',
        *(table(name, [("rows", "u1")], 8_000_000) for name in ("queues", "runs", "objects")),
    ),
    "a table without columns": lambda: payload(b"{}", table("runs", [], 1 << 40)),
    "columns without bytes": lambda: payload(b"{}", table("runs", [("rows", "S0")], 1 << 40)),
    "objects in a table": lambda: payload(b"{}", table("runs", [("rows", "O")], 1 << 20)),
    "rows": lambda: payload(b"{}", table("runs", [("rows", "<i8")], 1 << 60, b"")),
    "tables": lambda: payload(b"{}", *(table(f"{i:05}", [("a", "u1")], 0) for i in range(60_000))),
    "depth": lambda: payload(b"[" * 1_000_000),
}


MIB = 1 << 20
ALL_DECODERS = DECODERS | {
    GROUPS_KIND: lambda data: decode_snapshot(data, source=SOURCE),
    RETRIES_KIND: lambda data: decode_object(data, source=SOURCE),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_container_never_takes_much_memory(name: str) -> None:
    stored = compressed(BOMBS[name]())
    assert len(stored) < MIB
    for kind, decode in ALL_DECODERS.items():
        if name == "a narrow table" and kind not in (COMMIT_KIND, PAGE_KIND, ROOT_KIND):
            continue  # elsewhere it is what it seems
        with peak_below(160 * MIB), pytest.raises(CorruptionError, match=f"^{SOURCE}"):
            decode(sealed(kind, stored))


@pytest.fixture
def small_limit() -> int:
    """``fetch.memory_bytes`` of 8 MiB."""
    limit_decoding(8 * MIB)
    return 8 * MIB


@pytest.mark.parametrize("kind", ALL_DECODERS)
def test_no_object_takes_more_than_the_memory_setting(kind: bytes, small_limit: int) -> None:
    """Though its allowance would be larger: 64 MiB and more. It is not damaged, so no older version is read instead."""
    stored = compressed(payload(nested(b'"",', 500_000)))
    with (
        peak_below(small_limit + 4 * MIB),
        pytest.raises(ObjectTooLargeError, match=r"raise fetch\.memory_bytes"),
    ):
        ALL_DECODERS[kind](sealed(kind, stored))


def _kept_plan() -> list[str]:
    """The key of an export's plan."""
    store = MemoryStore()
    ExportProgress(store).keep_plan(1, {})
    return [info.key for info in store.list("")]


def test_whole_objects_are_read_within_the_memory_setting(small_limit: int) -> None:
    store = MemoryStore()
    store.put_if_absent("pages/p", [bytes(small_limit + 1)])
    with pytest.raises(ObjectTooLargeError, match="pages/p"):
        read_page_bytes(store, "pages/p")
    with pytest.raises(ObjectTooLargeError, match=r"fetch\.memory_bytes"):
        read_page_bytes(store, f"pages/c:0:{small_limit + 1}")
    key = catalog_key(1)
    store.put_if_absent(key, [bytes(small_limit + 1)])
    with pytest.raises(ObjectTooLargeError, match=key):
        read_commit(store, 1)
    name = next(iter(_kept_plan()))
    store.put_if_absent(name, [bytes(small_limit + 1)])
    with pytest.raises(ObjectTooLargeError, match=name):
        ExportProgress(store).plan(1)


@pytest.mark.parametrize("tail_bytes", [(1 << 30) + 1, (8 << 20) + 1])
def test_a_query_does_not_read_a_tail_above_the_limits(small_limit: int, tail_bytes: int) -> None:
    place = Place("data/00/a.so", 1 << 40, tail_bytes)
    source = QuerySource(ThreadRangeReader(MemoryStore(), 1), MemoryStore(), PlainBlocks(MemoryStore()))
    with pytest.raises((CorruptionError, ObjectTooLargeError), match=r"data/00/a\.so"):
        source.keys_of(place, 1).send(None)


def _with_footer(change: str) -> bytes:
    """A segment whose footer, behind valid checksums, claims something else."""
    rows = [RowSpec(b"record %d" % number, keys=(number,)) for number in range(60)]
    encoded = build([QueueKey("topic", 0, 0)], [RunSpec(0, 5, rows)]).encode(BlockCodec(block_bytes=400))
    data = whole(encoded)
    trailer = decode_trailer(data, len(data), source="s")
    footer = decode_container(data[trailer.footer_offset : -TRAILER_BYTES], FOOTER_KIND, source="s")
    header, tables = footer.header, dict(footer.tables)
    if change == "record":
        tables["blocks"] = tables["blocks"][:1].copy()
        tables["blocks"]["rows"], tables["blocks"]["raw_bytes"], tables["blocks"]["codec"] = (
            1,
            (1 << 32) - 1,
            1,
        )
        tables["blocks"]["stored_bytes"] = footer.tables["blocks"]["stored_bytes"].sum()
        tables["runs"]["blocks"], tables["runs"]["byte_count"], tables["runs"]["rows"] = 1, (1 << 32) - 1, 1
        tables["pages"]["rows"], tables["pages"]["raw_bytes"], tables["pages"]["codec"] = 1, 98, 1
    if change in ("page", "keys"):
        tables["pages"]["rows"], tables["pages"]["raw_bytes"] = 1 << 29, (1 << 32) - 1
        tables["pages"]["codec"] = tables["blocks"]["codec"] = 1
        tables["blocks"]["rows"][0] = (1 << 29) - int(tables["blocks"]["rows"][1:].sum())
        tables["blocks"]["raw_bytes"] = np.minimum(tables["blocks"]["raw_bytes"], 60 * MIB)
        tables["runs"]["rows"] = 1 << 29
    if change == "keys":
        header["keys"]["count"], header["keys"]["stored_counts_bytes"] = 0, sum(encoded_keys(encoded, data))
    if change == "queues":
        tables["queues"] = np.zeros(1_000_000, tables["queues"].dtype)
    sealed_footer = encode_container(FOOTER_KIND, header, tables)
    ending = encode_trailer(trailer.tail_offset, trailer.footer_offset, sealed_footer)
    return data[: trailer.footer_offset] + sealed_footer + ending


def encoded_keys(encoded: object, data: bytes) -> tuple[int, int]:
    """(stored bytes of counts, bytes of hashes) of the 60 keys."""
    trailer = decode_trailer(data, len(data), source="s")
    footer = decode_container(data[trailer.footer_offset : -TRAILER_BYTES], FOOTER_KIND, source="s")
    return int(footer.header["keys"]["stored_counts_bytes"]), 8 * int(footer.header["keys"]["count"])


@pytest.mark.parametrize("change", ["record", "page", "keys", "queues"])
def test_a_segment_cannot_claim_more_than_a_record_or_a_page_may_have(change: str) -> None:
    store = MemoryStore()
    store.put_if_absent("data/00/bomb.so", [_with_footer(change)])
    with peak_below(200 * MIB), pytest.raises(CorruptionError, match=r"data/00/bomb\.so"):
        reader = open_uncataloged(store, "data/00/bomb.so")
        reader.key_hashes()
        reader.row_columns(0)


@pytest.mark.parametrize(
    "text", [b'{"a":"' + b" " * (400 * MIB) + b'"}', nested(b"[],", 20_000_000)], ids=["text", "lists"]
)
def test_progress_of_an_export_does_not_expand_without_bound(text: bytes) -> None:
    store = MemoryStore()
    store.put_if_absent(f"{DIRECTORY}/{1:010d}.plan", [zstandard.ZstdCompressor().compress(text)])
    with peak_below(80 * MIB), pytest.raises(CorruptionError, match=rf"{DIRECTORY}/{1:010d}\.plan"):
        ExportProgress(store).plan(1)


def test_progress_that_is_no_object_is_damaged() -> None:
    store = MemoryStore()
    store.put_if_absent(
        f"{DIRECTORY}/{1:010d}.plan", [zstandard.ZstdCompressor().compress(orjson.dumps([1]))]
    )
    with pytest.raises(CorruptionError, match="not a JSON object"):
        ExportProgress(store).plan(1)


def test_a_broker_cannot_send_json_of_endless_values() -> None:
    text = nested(b"[],", 5_000_000)
    with peak_below(16 * MIB), pytest.raises(CorruptionError, match="values"):
        fastjson.loads(text)


SHORT_OF_MEMORY = """
    import resource, sys
    import numpy as np
    from tiered.catalog.pages import decode_catalog_page, encode_catalog_page, Page
    from tiered.catalog.state import RunChunk
    from tiered.errors import OutOfMemoryError, TieredError
    from tiered.formats.memory_bound import SHORTAGES
    from tiered.model.queue import QueueKey
    from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE

    def page(runs):
        chunk = RunChunk(np.zeros(runs, RUN_DTYPE), np.zeros(1, OBJECT_DTYPE), ("k",))
        return encode_catalog_page(Page([QueueKey("t", 0, 0)], chunk))

    large, small = page(500_000), page(1)
    decode_catalog_page(large, source="large")
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        decode_catalog_page(large, source="the/large/page")
    except OutOfMemoryError as error:
        assert "the/large/page" in str(error) and error.exit_code == 4
    else:
        sys.exit("decoded")
    assert SHORTAGES.count == 1
    assert len(decode_catalog_page(small, source="small").chunk.runs) == 1
"""


def test_memory_that_does_not_suffice_is_an_error_that_names_the_object() -> None:
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHORT_OF_MEMORY)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "the/large/page" in found.stderr  # logged


def test_work_that_runs_out_of_memory_names_its_object() -> None:
    before = SHORTAGES.count
    with pytest.raises(OutOfMemoryError, match="the/object"), memory_contained("the/object"):
        raise MemoryError
    assert SHORTAGES.count == before + 1


PIECES = [
    b"[],",
    b"[0],",
    b"{},",
    b'{"a":0},',
    b"257,",
    b'"\xc3\xa9t\xc3\xa9",',
    b"1.5,",
    b"[[],0],",
    b'{"\xe2\x82\xac":[0,1]},',
]
COLUMNS = [[("rows", "u1")], [("topic", "<u4"), ("queue_id", "<i4"), ("generation", "<u4")], [("x", "S50")]]


@pytest.mark.integration
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(ALL_DECODERS)),
    st.sampled_from(PIECES),
    st.integers(0, 4_000_000),
    st.lists(
        st.tuples(
            st.sampled_from(["queues", "runs", "objects", "gaps"]),
            st.sampled_from(COLUMNS),
            st.integers(0, 4_000_000),
        ),
        max_size=3,
    ),
)
def test_no_claim_takes_more_than_the_allowance(
    kind: bytes, piece: bytes, count: int, tables: list[tuple[str, list[tuple[str, str]], int]]
) -> None:
    """Also what is decoded: estimates of JSON and tables are not below what Python takes."""
    raw = payload(nested(piece, count), *(table(name, columns, rows) for name, columns, rows in tables))
    data = sealed(kind, compressed(raw))
    allowance = SMALL if kind in (COMMIT_KIND, FOOTER_KIND, INDEX_KIND) else LARGE
    with peak_below(allowance.free_bytes + allowance.ratio * len(data) + 16 * MIB), suppress(CorruptionError):
        ALL_DECODERS[kind](data)
