"""docs/FORMATS.md says what the code does: every column, header field, kind, magic and message field is in it."""

import re
from pathlib import Path
from typing import Any

import fastcrc
import numpy as np
import pytest

from tests.formats.golden_archive import GOLDEN, STATE_KIND
from tiered.archive.index import layout as index_layout
from tiered.archive.index.layout import COVERED_DTYPE
from tiered.archive.index.layout import FOOTER_KIND as INDEX_FOOTER_KIND
from tiered.archive.index.places import PAGE_DTYPE as PLACES_PAGE_DTYPE
from tiered.archive.index.places import PLACE_DTYPE
from tiered.catalog.apply import KEEP_EVERY, KEPT_MAX
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import COMMIT_KIND, ROOT_KIND
from tiered.catalog.deletions import LIST_KIND
from tiered.catalog.index_refs import IndexRef
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.pages import PAGE_KIND
from tiered.catalog.state import REMOVED_DTYPE
from tiered.catalog.timer_refs import TIMER_DTYPE
from tiered.formats import segment_layout, timer_object
from tiered.formats.container import DICTIONARY, decode_container
from tiered.formats.fields import FIELD_TABLE, INNER_FIELD_TABLE
from tiered.formats.keys import ESCAPED_CHARACTERS_MAX
from tiered.formats.segment_layout import (
    BLOCK_DTYPE,
    FOOTER_KIND,
    PAGE_ROWS,
    SEGMENT_RUN_DTYPE,
    TRAILER_BYTES,
)
from tiered.formats.timer_object import ENTRY_DTYPE, HOUR_DTYPE
from tiered.formats.version import FORMAT_MAJOR, FORMAT_MINOR
from tiered.model.tables import (
    FLOOR_DTYPE,
    GAP_DTYPE,
    OBJECT_DTYPE,
    QUEUE_DTYPE,
    QUEUE_STATE_DTYPE,
    RUN_DTYPE,
)
from tiered.object_store.file import FileStore

DOCUMENT = (Path(__file__).parents[2] / "docs" / "FORMATS.md").read_text("utf-8")
TRAILERS = {FOOTER_KIND: TRAILER_BYTES, INDEX_FOOTER_KIND: index_layout.TRAILER_BYTES}
NAMES = {"u1": "u8", "u2": "u16", "u4": "u32", "i4": "i32", "i8": "i64", "u8": "u64"}
SECTIONS = {
    "Segment": [QUEUE_DTYPE, SEGMENT_RUN_DTYPE, BLOCK_DTYPE, segment_layout.PART_DTYPE],
    "Commit": [RUN_DTYPE, OBJECT_DTYPE, GAP_DTYPE, REMOVED_DTYPE, FLOOR_DTYPE, TIMER_DTYPE],
    "Timer object": [ENTRY_DTYPE, HOUR_DTYPE, timer_object.PAGE_DTYPE],
    "Root page": [QUEUE_STATE_DTYPE],
    "Index file": [PLACE_DTYPE, COVERED_DTYPE, PLACES_PAGE_DTYPE],
}


def _section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def _tables(text: str) -> list[list[tuple[str, str]]]:
    """(field, type) rows of every table with these columns."""
    tables = re.findall(
        r"^\| field \| type \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    return [re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE) for table in tables]


@pytest.mark.parametrize("title", sorted(SECTIONS))
def test_tables_have_these_columns(title: str) -> None:
    documented = _tables(_section(title))
    expected: list[np.dtype[Any]] = SECTIONS[title]
    assert documented == [
        [(name, NAMES[dtype[name].str[1:]]) for name in dtype.names or ()] for dtype in expected
    ]


@pytest.mark.parametrize(
    ("prefix", "kind", "title"),
    [
        ("index/", INDEX_FOOTER_KIND, "Index file"),
        ("catalog/", COMMIT_KIND, "Commit"),
        ("root", ROOT_KIND, "Root page"),
        ("pages/runs", PAGE_KIND, "Run page"),
        ("state/", STATE_KIND, "State object"),
        ("sets/", FOOTER_KIND, "Segment"),
    ],
)
def test_headers_have_these_fields(prefix: str, kind: bytes, title: str) -> None:
    store = FileStore(GOLDEN / "1.0" / "archive")
    key = load(store).root.key if prefix == "root" else next(iter(store.list(prefix))).key
    data = read_page_bytes(store, key)
    if kind in TRAILERS:
        data = data[data.rindex(kind) : -TRAILERS[kind]]
    found = decode_container(data, kind, source=key)
    missing = [name for name in (*found.header, *found.tables) if f"`{name}`" not in _section(title)]
    assert not missing


def test_message_fields_are_these() -> None:
    documented = _tables(_section("Message fields"))
    assert [[name for name, _ in table] for table in documented] == [
        [field.name for field in FIELD_TABLE],
        [field.name for field in INNER_FIELD_TABLE],
    ]


def test_reserved_names_are_these() -> None:
    reserved = _section("Versions").partition("Reserved in 1.0")[2]
    for name in ("quarantine",):
        assert f"`{name}`" in reserved


def test_constants_are_these() -> None:
    magics = (segment_layout.TRAILER_MAGIC, index_layout.TRAILER_MAGIC)
    for kind in (
        COMMIT_KIND,
        ROOT_KIND,
        PAGE_KIND,
        LIST_KIND,
        STATE_KIND,
        FOOTER_KIND,
        segment_layout.PART_KIND,
        INDEX_FOOTER_KIND,
        *magics,
    ):
        assert f"`{kind.decode()}`" in DOCUMENT
    assert f"format version {FORMAT_MAJOR}.{FORMAT_MINOR}" in DOCUMENT
    assert f"{len(DICTIONARY):,} bytes" in _section("Container")
    assert f"CRC32C `{fastcrc.crc32.iscsi(DICTIONARY):08x}`" in _section("Container")
    assert f"first of every {KEEP_EVERY:,}" in DOCUMENT and f"up to {KEPT_MAX};" in DOCUMENT
    assert f"Pages of {PAGE_ROWS:,} rows" in DOCUMENT
    assert f"more than {segment_layout.PART_RUNS:,} runs" in DOCUMENT
    assert f"more than {ESCAPED_CHARACTERS_MAX} characters" in DOCUMENT
    assert f"The last {TRAILER_BYTES} bytes" in DOCUMENT
    assert f"Pages of {index_layout.PAGE_ITEMS} items" in DOCUMENT
    assert f"The last {index_layout.TRAILER_BYTES} bytes" in DOCUMENT
    fields = [name for name in IndexRef._fields if f"`{name}`" not in _section("Commit")]
    assert not fields
    assert f"above {segment_layout.BLOCK_RAW_BYTES_MAX >> 20} MiB" in DOCUMENT
