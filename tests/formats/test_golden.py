"""The archive written when format 1.0 was fixed is read by today's code; newer versions are refused by name."""

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fastcrc
import pytest

from tests.archive.queue_reader import QueueReader
from tests.archive.uncataloged import open_uncataloged
from tests.formats.golden_archive import GOLDEN, STATE_DOCUMENT, STATE_KIND, of_many_queues, write
from tests.formats.golden_bytes import assert_same_files, needs_golden_zstd
from tiered.archive.segment_reader import SegmentReader
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import COMMIT_KIND, ROOT_KIND, decode_commit, decode_root
from tiered.catalog.pages import PAGE_KIND, decode_catalog_page
from tiered.errors import UnsupportedFormatError
from tiered.formats.container import HEADER, decode_container
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import FOOTER_KIND, PART_RUNS
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore

VERSION = GOLDEN / "1.0"
ARCHIVE = VERSION / "archive"


def _newer(container: bytes) -> bytes:
    """The same container, saying it is of major version 2; its checksum is right."""
    fields = list(HEADER.unpack_from(container))
    fields[1] = 2
    head = HEADER.pack(*fields)[:-4]
    crc: int = fastcrc.crc32.iscsi(head)
    return head + crc.to_bytes(4, "little") + container[HEADER.size :]


def _keys(prefix: str) -> list[str]:
    return [info.key for info in FileStore(ARCHIVE).list(prefix)]


def test_every_message_of_the_golden_archive_comes_back() -> None:
    store = FileStore(ARCHIVE)
    expected: dict[str, Any] = json.loads((VERSION / "expected.json").read_text())
    state = load(store)
    assert (state.version, state.cursor.phys) == (expected["version"], expected["phys"])
    assert len(expected["queues"]) == state.queue_count
    for item in expected["queues"]:
        reader = QueueReader(store, state, QueueKey(*item["queue"]))
        offset, found, gaps = reader.min_offset, [], []
        while offset < reader.max_offset:
            batch = reader.read(offset, max_rows=7, max_bytes=1 << 20)
            offset = batch.next_offset
            gaps += [list(batch.gap)] if batch.gap else []
            for i in range(len(batch)):
                start = int(batch.starts[i])
                record = batch.data[start : start + int(batch.sizes[i])].tobytes()
                found.append(
                    {
                        "offset": int(batch.queue_offsets[i]),
                        "inner_num": int(batch.inner_num[i]),
                        "phys": int(batch.phys[i]),
                        "tags_code": int(batch.tags_code[i]),
                        "store_timestamp": int(batch.store_timestamp[i]),
                        "record": base64.b64encode(record).decode(),
                    }
                )
        assert (found, gaps) == (item["rows"], item["gaps"])


def test_the_golden_archive_is_whole() -> None:
    report = verify_archive(FileStore(ARCHIVE), depth="full")
    assert (report.anomalies, report.leftovers) == ([], [])


def test_the_golden_archive_has_every_kind_of_object() -> None:
    store = FileStore(ARCHIVE)
    assert len(_keys("catalog/")) > 5
    assert any(key.startswith("pages/runs") for key in _keys("pages/"))
    assert any(key.startswith("pages/root") for key in _keys("pages/"))
    for prefix in ("data/", "sets/"):
        key = _keys(prefix)[0]
        assert len(open_uncataloged(store, key).index.runs) == (1 if prefix == "data/" else 5)
    (state_key,) = _keys("state/")
    assert decode_container(store.get(state_key), STATE_KIND, source=state_key).header == STATE_DOCUMENT


def test_the_golden_archive_is_what_is_written_today(tmp_path: Path) -> None:
    """Commits, roots, pages, segments, index files and states have the golden bytes: a format change needs a version.

    Compressed bytes depend on the zstd library. It is locked; another one is skipped."""
    needs_golden_zstd()
    write(tmp_path)
    assert_same_files(tmp_path / "archive", ARCHIVE)
    for name in ("expected.json", "parts.sso"):
        assert (tmp_path / name).read_bytes() == (VERSION / name).read_bytes()


@pytest.mark.parametrize("part", [None, 0, 1])
def test_the_golden_object_of_many_queues_is_read(part: int | None) -> None:
    data, truth = (VERSION / "parts.sso").read_bytes(), of_many_queues()
    index = SegmentIndex("golden", len(data), data, part)
    assert (index.first_run, len(index)) == ((part or 0) * PART_RUNS, {None: 2049, 0: 2048, 1: 1}[part])
    for run in range(index.first_run, index.first_run + len(index)):
        assert index.queue_of(run) == truth.queues[run]
        rows = index.row_columns(run)
        assert rows.phys.tolist() == truth.rows.phys[run : run + 1].tolist()
        assert [index.queues[at] for at in rows.parent.tolist() if at >= 0] == [truth.queues[77]] * (
            run == 2048
        )


def test_a_newer_segment_is_refused_by_name() -> None:
    store = FileStore(ARCHIVE)
    key = _keys("sets/")[0]
    index = open_uncataloged(store, key).index
    data = bytearray(store.get(key))
    trailer = data[-48:]
    trailer[20:22] = (2).to_bytes(2, "little")
    trailer[24:28] = bytes(4)
    crc: int = fastcrc.crc32.iscsi(bytes(trailer))
    trailer[24:28] = crc.to_bytes(4, "little")
    newer = MemoryStore()
    newer.put_if_absent(key, [bytes(data[:-48]) + bytes(trailer)])
    with pytest.raises(UnsupportedFormatError, match=r"segment has format 2\.0, and this program reads 1\.x"):
        SegmentReader.open(newer, key, size_bytes=len(data), tail_bytes=len(data) - index.tail_offset)


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [("catalog/", COMMIT_KIND), ("pages/root", ROOT_KIND), ("pages/runs", PAGE_KIND), ("state/", STATE_KIND)],
)
def test_a_newer_container_is_refused_by_name(prefix: str, kind: bytes) -> None:
    store = FileStore(ARCHIVE)
    key = _keys(prefix)[0]
    newer = _newer(store.get(key))
    decoders: dict[bytes, Callable[..., object]] = {
        COMMIT_KIND: decode_commit,
        ROOT_KIND: decode_root,
        PAGE_KIND: decode_catalog_page,
        STATE_KIND: partial(decode_container, kind=STATE_KIND),
    }
    wanted = rf"{key}: {kind.decode()} container has format 2\.0, and this program reads 1\.x"
    with pytest.raises(UnsupportedFormatError, match=wanted):
        decoders[kind](newer, source=key)


def test_a_newer_footer_is_refused_by_name() -> None:
    data = FileStore(ARCHIVE).get(_keys("sets/")[0])
    footer = data[data.rindex(FOOTER_KIND) : -48]
    decode_container(footer, FOOTER_KIND, source="footer")
    with pytest.raises(UnsupportedFormatError, match="RMQTSEGF"):
        decode_container(_newer(footer), FOOTER_KIND, source="footer")
