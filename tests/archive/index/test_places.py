"""Places of index files: the queue of each record by physical offset."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.archive.index.builder import KEY, META, NOTHING
from tiered.archive.index import places as places_module
from tiered.archive.index.footer import decode_tail
from tiered.archive.index.items import Widths
from tiered.archive.index.layout import Form
from tiered.archive.index.merge import file_places
from tiered.archive.index.places import (
    PLACE_DTYPE,
    Places,
    decode_places,
    encode_places,
    joined_places,
    merged_places,
    missing_places,
    pages_of,
    pages_with,
)
from tiered.archive.index.writer import write_index
from tiered.errors import CorruptionError
from tiered.model.queue import QueueKey

QUEUES = [QueueKey(f"topic{number % 3}", number, number % 2) for number in range(7)]
ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, len(QUEUES) - 1)), max_size=60)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "PAGE_ROWS", 8)


def places_of(rows: list[tuple[int, int]]) -> Places:
    return joined_places([Places(QUEUES, np.array(rows, PLACE_DTYPE))])


def named(places: list[Places]) -> list[tuple[int, QueueKey]]:
    return [(phys, page.queues[queue]) for page in places for phys, queue in page.rows.tolist()]


class _File(bytearray):
    write = bytearray.extend


@given(rows=ROWS, others=ROWS, order=st.permutations(range(len(QUEUES))))
def test_missing_places_are_those_that_joining_adds(
    rows: list[tuple[int, int]], others: list[tuple[int, int]], order: list[int]
) -> None:
    known = places_of(rows)
    wanted = Places([QUEUES[number] for number in order], np.array(others, PLACE_DTYPE))
    assert missing_places(known, wanted) == len(joined_places([known, wanted])) - len(known)


@given(parts=st.lists(ROWS, max_size=4))
def test_merged_files_name_every_place_once(parts: list[list[tuple[int, int]]]) -> None:
    merged = list(merged_places([pages_of(places_of(rows)) for rows in parts]))
    expected = {(phys, QUEUES[queue]) for rows in parts for phys, queue in rows}
    assert set(named(merged)) == expected
    assert len(named(merged)) == len(expected)
    assert [phys for phys, _ in named(merged)] == sorted(phys for phys, _ in expected)
    assert all(len(page) == 8 for page in merged[:-1])

    sink = _File()
    shape = write_index(sink, KEY, [], META, NOTHING, Form(0, Widths(0, 0, 0, 0), 0), merged)

    def read(_: str, offset: int, length: int) -> bytes:
        return bytes(sink[offset : offset + length])

    _, covered = decode_tail(shape, read(KEY, *shape.tail_range))
    assert named(list(file_places(read, shape, covered))) == named(merged)
    for phys in range(62):
        found: set[QueueKey] = set()
        for page in pages_with(covered.pages, phys).tolist():
            found |= decode_places(read(KEY, *covered.page_range(shape, page)), KEY).at(phys)
        assert found == {queue for at, queue in expected if at == phys}


def test_a_damaged_page_is_an_error() -> None:
    page = encode_places(places_of([(5, 1), (9, 2)]))
    assert named([decode_places(page, KEY)]) == [(5, QUEUES[1]), (9, QUEUES[2])]
    for at in range(len(page)):
        changed = bytearray(page)
        changed[at] ^= 4
        with pytest.raises(CorruptionError):
            decode_places(bytes(changed), KEY)
