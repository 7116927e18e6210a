"""Index files: every item is found in two reads; damage is detected."""

import asyncio
from typing import Any

import fastcrc
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive.index.builder import KEY, META, IndexBytes, build, items_of
from tests.sweeps import examples
from tiered.archive.index.footer import Covered, decode_tail, joined
from tiered.archive.index.items import ITEM_DTYPE, Widths, decode_items, encode_items, widths_for
from tiered.archive.index.key_hash import key_hash, xxh64
from tiered.archive.index.layout import COVERED_DTYPE, PAGE_ITEMS, SLOT_ITEMS, TRAILER, Form, Shape
from tiered.archive.index.lookup import Matches, Wanted, find_items
from tiered.archive.index.merge import file_items, merged_items
from tiered.archive.index.order import in_order, item_key, position_after, sorted_items
from tiered.archive.index.writer import write_index
from tiered.errors import CorruptionError, UnsupportedFormatError
from tiered.model.tables import Table

BEGIN_MS = META.begin_ms
ALWAYS = (-(1 << 63), (1 << 63) - 1)

HASHES = st.one_of(st.integers(0, 3), st.integers(0, (1 << 64) - 1))
TIMES = st.one_of(
    st.integers(BEGIN_MS, BEGIN_MS + 3), st.sampled_from([-(1 << 63), -1, 0, 1 << 62, (1 << 63) - 1])
)
"""A record's time is in no checksum of most records: one flipped bit makes it any."""
ROWS = st.lists(
    st.tuples(HASHES, st.integers(0, 5), TIMES, st.integers(-1, 1), st.integers(0, 1)),
    max_size=400,
)


def find(
    file: IndexBytes, hash_: int, begin_ms: int = ALWAYS[0], end_ms: int = ALWAYS[1], items_max: int = 1 << 30
) -> Matches:
    """The answer of a query."""
    return asyncio.run(find_items(file.read, file.shape, Wanted(hash_, begin_ms, end_ms, items_max)))


def expected(items: Table, hash_: int, begin_ms: int, end_ms: int) -> list[Any]:
    """Slow and obvious."""
    inside = [
        item
        for item in {tuple(row.tolist()) for row in items}
        if item[0] == hash_ and begin_ms <= item[2] <= end_ms
    ]
    return sorted(inside, key=lambda item: (-item[2], item[3], item[4], -item[1]))


@given(st.binary(max_size=200))
def test_the_hash_is_xxh64(data: bytes) -> None:
    assert xxh64(data) == xxhash.xxh64_intdigest(data)
    assert key_hash("t", "日志") == xxhash.xxh64_intdigest("t#日志".encode())


@settings(max_examples=examples(60))
@given(rows=ROWS, begin=st.integers(-1, 4), length=st.integers(0, 4), expect=st.sampled_from([0, 50, 5000]))
def test_every_item_is_found_and_no_other(
    rows: list[tuple[int, int, int, int, int]], begin: int, length: int, expect: int
) -> None:
    items = items_of(rows)
    file = build(items, items_expected=expect, chunk=7)
    for hash_ in {*(row[0] for row in rows), 5, (1 << 64) - 1}:
        window = (BEGIN_MS + begin, BEGIN_MS + begin + length)
        for low, high in (ALWAYS, window):
            found = find(file, hash_, low, high)
            assert found.is_all
            assert [tuple(item.tolist()) for item in found.items] == expected(items, hash_, low, high)


@pytest.mark.parametrize("guessed_items_max", [1 << 20, 0])
def test_a_key_costs_one_read_or_two(monkeypatch: pytest.MonkeyPatch, guessed_items_max: int) -> None:
    """Two in a file that is too large for its position to be known."""
    monkeypatch.setattr("tiered.archive.index.lookup.GUESSED_ITEMS_MAX", guessed_items_max)
    generator = np.random.default_rng(1)
    items = np.zeros(200_000, ITEM_DTYPE)
    items["hash"] = generator.integers(0, 1 << 64, len(items), dtype=np.uint64)
    items["store_timestamp"] = BEGIN_MS + np.arange(len(items))
    file = build(items, chunk=50_000)
    assert 1 << file.shape.slot_bits >= len(items) // SLOT_ITEMS // 2
    reads = []
    for number in range(0, len(items), 1999):
        file.reads = 0
        found = find(file, int(items["hash"][number]))
        assert found.items["store_timestamp"].tolist() == [BEGIN_MS + number]
        reads.append(file.reads)
    assert set(reads) == ({1} if guessed_items_max else {2})
    file.reads = 0
    assert len(find(file, 0x1234_5678_9ABC_DEF0).items) == 0
    assert file.reads <= 2
    items["hash"][: len(items) // 2] = 1 << 63
    shifted = find(build(items, chunk=50_000), int(items["hash"][-1]))
    assert shifted.items["store_timestamp"].tolist() == [BEGIN_MS + len(items) - 1]


def test_a_key_of_very_many_messages_is_searched_by_halving_and_read_in_part() -> None:
    count = 100_000
    items = np.zeros(count + 2, ITEM_DTYPE)
    items["hash"][:count] = 1 << 40
    items["hash"][count:] = [(1 << 40) - 1, (1 << 40) + 1]
    items["store_timestamp"] = BEGIN_MS + np.arange(count + 2)
    items["queue_offset"] = np.arange(count + 2)
    file = build(items)
    newest = find(file, 1 << 40, items_max=64)
    assert not newest.is_all
    assert newest.items["queue_offset"][:64].tolist() == list(range(count - 1, count - 65, -1))
    assert file.reads <= 4
    file.reads = 0
    assert find(file, 1 << 40, 0, BEGIN_MS + 5).items["queue_offset"].tolist() == [5, 4, 3, 2, 1, 0]
    assert file.reads <= 3 + (count // PAGE_ITEMS).bit_length() + 1
    for hash_, offset in ((1 << 40) - 1, count), ((1 << 40) + 1, count + 1):
        assert find(file, hash_).items["queue_offset"].tolist() == [offset]
    assert len(find(file, 1 << 40).items) == count


@settings(max_examples=examples(40))
@given(rows=ROWS.filter(bool), data=st.data())
def test_a_flipped_bit_is_an_error_or_does_not_matter(
    rows: list[tuple[int, int, int, int, int]], data: st.DataObject
) -> None:
    items = items_of(rows)
    file = build(items, items_expected=50)
    at = data.draw(st.integers(0, len(file.data) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = bytearray(file.data)
    changed[at] ^= 1 << bit
    broken = IndexBytes(file.shape, bytes(changed))
    for hash_ in {row[0] for row in rows}:
        try:
            found = find(broken, hash_)
        except CorruptionError as error:
            assert KEY in error.message
        else:
            assert [tuple(item.tolist()) for item in found.items] == expected(items, hash_, *ALWAYS)


def test_bytes_of_another_index_file_are_refused() -> None:
    items = items_of([(1, 1, BEGIN_MS, 0, 0), (2, 2, BEGIN_MS, 0, 0)])
    one, other = build(items), build(items, key=KEY.replace("1_a", "1_b"))
    assert one.shape.size_bytes == other.shape.size_bytes
    with pytest.raises(CorruptionError, match="fails its checksum"):
        find(IndexBytes(one.shape, other.data), 1)


@given(
    st.lists(
        st.tuples(
            st.integers(0, (1 << 64) - 1),
            st.integers(0, (1 << 63) - 1),
            st.integers(0, 1 << 45),
            st.integers(-(1 << 31), (1 << 31) - 1),
            st.integers(0, (1 << 32) - 1),
        )
    ),
    st.integers(0, 1 << 40),
)
def test_items_of_any_size_come_back(rows: list[tuple[int, int, int, int, int]], base_ms: int) -> None:
    items = items_of(rows)
    items["store_timestamp"] += base_ms
    widths = widths_for(items, 1 << 45)
    assert decode_items(encode_items(items, widths, base_ms), widths, base_ms).tolist() == items.tolist()
    if len(items) and widths.queue_offset:
        with pytest.raises(ValueError, match="do not fit"):
            encode_items(items, widths._replace(queue_offset=widths.queue_offset - 1), base_ms)


@pytest.mark.parametrize(
    "change",
    [{"items": 300}, {"slot_bits": 9}, {"size_bytes": 50}, {"tail_bytes": 1}, {"widths": Widths(1, 2, 1, 9)}],
)
def test_a_catalog_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    shape = build(items_of([(1, 1, BEGIN_MS, 0, 0)])).shape
    with pytest.raises(CorruptionError):
        Shape(**{name: getattr(shape, name) for name in Shape.__dataclass_fields__} | change)


def test_the_tail_says_what_is_covered_and_finds_objects_by_physical_offset() -> None:
    objects = np.zeros(3, COVERED_DTYPE)
    objects["key"] = [0, 1, 2]
    objects["min_phys"], objects["end_phys"] = [0, 0, 100], [100, 100, 200]
    objects["raw_bytes"] = [10, 90, 100]
    covered = joined([Covered(objects, ("a", "b", "c")), Covered(objects[:1], ("a",))])
    file = build(items_of([]), covered=covered)
    offset, length = file.shape.tail_range
    meta, found = decode_tail(file.shape, file.data[offset : offset + length])
    assert meta == META
    assert [key for key, _ in found.at(50)] == ["b", "a"]
    assert [key for key, _ in found.at(100)] == ["c"]
    assert found.at(200) == []
    for at in range(offset, len(file.data)):
        changed = bytearray(file.data)
        changed[at] ^= 0x10
        with pytest.raises((CorruptionError, UnsupportedFormatError)):
            decode_tail(file.shape, bytes(changed[offset:]))


def test_a_newer_major_version_is_refused_by_name() -> None:
    file = build(items_of([]))
    fields = list(TRAILER.unpack(file.data[-TRAILER.size :]))
    fields[4], fields[6] = 2, 0
    fields[6] = fastcrc.crc32.iscsi(TRAILER.pack(*fields))
    tail = file.data[file.shape.footer_offset : -TRAILER.size] + TRAILER.pack(*fields)
    with pytest.raises(
        UnsupportedFormatError, match=r"index file has format 2\.0, and this program reads 1\.x"
    ):
        decode_tail(file.shape, tail)


def test_items_out_of_order_are_never_written() -> None:
    items = sorted_items(items_of([(1, 1, BEGIN_MS, 0, 0), (2, 2, BEGIN_MS, 0, 0)]))
    for chunks in ([items[::-1]], [items, items], [items[1:], items[:1]]):
        sink = bytearray()
        with pytest.raises(ValueError, match="are not in order"):
            write_index(
                type("Sink", (), {"write": sink.extend})(),
                KEY,
                chunks,
                META,
                Covered(np.zeros(0, COVERED_DTYPE), ()),
                Form(0, Widths(8, 8, 5, 4), 0),
            )


@settings(max_examples=examples(60))
@given(parts=st.lists(ROWS, min_size=1, max_size=4), memory=st.sampled_from([1, 300, 100_000]))
def test_merging_streams_keeps_every_item_once(
    parts: list[list[tuple[int, int, int, int, int]]], memory: int
) -> None:
    files = [
        build(items_of(rows), key=f"index/{number:013d}-0000000000000-1_x.idx")
        for number, rows in enumerate(parts)
    ]
    by_key = {file.shape.key: file for file in files}
    chunks = list(
        merged_items(
            lambda key, offset, length: by_key[key].read_now(key, offset, length),
            [file.shape for file in files],
            items_in_memory=memory,
        )
    )
    merged = np.concatenate([np.zeros(0, ITEM_DTYPE), *chunks])
    wanted = sorted_items(items_of([row for rows in parts for row in rows]))
    assert merged.tolist() == wanted.tolist()
    assert in_order(merged)
    for file in files:
        again = np.concatenate(
            [np.zeros(0, ITEM_DTYPE), *file_items(file.read_now, file.shape, pages_at_once=2)]
        )
        assert len(again) == file.shape.items


def test_merging_a_key_that_fills_whole_files_holds_little_in_memory() -> None:
    files = []
    for number in range(3):
        items = np.zeros(50_000, ITEM_DTYPE)
        items["hash"] = 7
        items["store_timestamp"] = BEGIN_MS + 3 * np.arange(len(items)) + number
        files.append(build(items, key=f"index/{number:013d}-0000000000000-1_x.idx"))
    by_key = {file.shape.key: file for file in files}
    sizes = [
        len(chunk)
        for chunk in merged_items(
            lambda key, offset, length: by_key[key].read_now(key, offset, length),
            [file.shape for file in files],
            items_in_memory=6_000,
        )
    ]
    assert sum(sizes) == 150_000
    assert max(sizes) <= 6_000


@given(rows=ROWS.filter(bool), probe=ROWS.filter(bool))
def test_positions_are_those_of_the_sort_key(
    rows: list[tuple[int, int, int, int, int]], probe: list[tuple[int, int, int, int, int]]
) -> None:
    items, item = sorted_items(items_of(rows)), items_of(probe)[0]
    assert position_after(items, item) == sum(item_key(other) <= item_key(item) for other in items)
