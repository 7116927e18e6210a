"""Where messages are by physical offset: pages of an index file that name the queue of each record.

An offsetMsgId names a physical offset alone. A cycle's object holds a range of them, but a compacted object holds some
of a long range, as thousands of others do: without its queue, a record would be searched in all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.state import renumbered
from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.part_rows import in_object_order, rows_of_parts
from tiered.formats.queue_names import queues_of
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of, united
from tiered.model.tables import RunKind, Table, concatenated, picked

PAGE_KIND = b"RMQTIDXP"
PAGE_ROWS = 8192
PLACE_DTYPE = np.dtype([("phys", "<i8"), ("queue", "<u4")])
PAGE_DTYPE = np.dtype([("first_phys", "<i8"), ("rows", "<u4"), ("stored_bytes", "<u4")])
"""How the footer of an index file describes a page of places. Pages follow one another from the end of the slots."""


@dataclass(frozen=True)
class Places:
    """Where records are: ``rows`` (PLACE_DTYPE) with the physical offset of each, sorted by it, and its queue, as an
    index into ``queues``."""

    queues: Sequence[QueueKey]
    rows: Table

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, phys: int) -> set[QueueKey]:
        """The queues with a record at ``phys``: one, or those of several log histories."""
        found = self.rows["queue"][self.rows["phys"] == phys]
        return {self.queues[number] for number in found.tolist()}


def places_of_segment(index: SegmentIndex, runs: Table) -> Places:
    """The places (commitlog offset and queue) of the records of ``runs`` in the data object of ``index``, in any order;
    without records that were in no commitlog, and without LMQ rows, which have no record of their own. Raises
    CorruptionError unless the object has all of these runs."""
    runs = in_object_order(index, runs)
    own = picked(index.runs, runs["ordinal"])
    is_logged = (own["kind"] != RunKind.LMQ) & (own["min_phys"] >= 0)
    queue = own["queue"][is_logged]
    parts = []
    for rows in rows_of_parts(index, picked(runs, is_logged)):
        part = np.empty(len(rows.row), PLACE_DTYPE)
        part["phys"], part["queue"] = rows.phys, queue[rows.part]
        parts.append(part)
    return Places(index.queues, concatenated(parts, PLACE_DTYPE))


def joined_places(parts: Iterable[Places]) -> Places:
    """The places of all ``parts`` together, by commitlog offset, each of equal ones once; their queues get new
    numbers."""
    names, tables = [], []
    for part in parts:
        used, number = renumbered(part.rows["queue"], len(part.queues))
        names.append(selection_of(part.queues).taken(used))
        tables.append(part.rows.copy())
        tables[-1]["queue"] = number
    queues, numbers = united(names)
    for rows, number in zip(tables, numbers, strict=True):
        rows["queue"] = number[rows["queue"]]
    joined = concatenated(tables, PLACE_DTYPE)
    joined = picked(joined, np.lexsort((joined["queue"], joined["phys"])))
    is_new = np.ones(len(joined), bool)
    is_new[1:] = (np.diff(joined["phys"]) != 0) | (np.diff(joined["queue"]) != 0)
    return Places(queues, picked(joined, is_new))


def missing_places(named: Places, wanted: Places) -> int:
    """How many different places (commitlog offset and queue) of ``wanted`` are not among ``named``, which are sorted by
    commitlog offset."""
    _, (number, wanted_number) = united([named.queues, wanted.queues])
    named_queue, queue = number[named.rows["queue"]], wanted_number[wanted.rows["queue"]]
    named_phys = np.ascontiguousarray(named.rows["phys"])
    at, end = (
        np.searchsorted(named_phys, wanted.rows["phys"]),
        np.searchsorted(named_phys, wanted.rows["phys"], "right"),
    )
    is_named = np.zeros(len(queue), bool)
    for step in range(int((end - at).max(initial=0))):  # several queues may have a record at one offset
        place = np.minimum(at + step, len(named_phys) - 1)
        is_named |= (at + step < end) & (named_queue[place] == queue)
    return len(np.unique(wanted.rows[~is_named]))


def pages_of(places: Places) -> Iterator[Places]:
    """``places``, which are in order, in pages."""
    for begin in range(0, len(places), PAGE_ROWS):
        yield Places(places.queues, places.rows[begin : begin + PAGE_ROWS])


def merged_places(streams: Sequence[Iterator[Places]]) -> Iterator[Places]:
    """Merge ``streams`` of pages of places, each sorted by commitlog offset, into one stream of full pages, in which
    equal places are there once. A page of each stream is in memory."""
    unread: list[Places | None] = [next(stream, None) for stream in streams]  # the rest of each stream's page
    rest = Places([], np.zeros(0, PLACE_DTYPE))
    while any(page is not None for page in unread):
        # Up to the first end of a page, all places are in memory.
        limit = min(int(page.rows["phys"][-1]) for page in unread if page is not None)
        ready = [rest]
        for number, page in enumerate(unread):
            if page is None:
                continue
            count = int(np.searchsorted(page.rows["phys"], limit, side="right"))
            ready.append(Places(page.queues, page.rows[:count]))
            left = Places(page.queues, page.rows[count:])
            unread[number] = left if len(left) else next(streams[number], None)
        rest = joined_places(ready)
        whole = len(rest) // PAGE_ROWS * PAGE_ROWS
        yield from pages_of(Places(rest.queues, rest.rows[:whole]))
        rest = Places(rest.queues, rest.rows[whole:])
    yield from pages_of(rest)


def encode_places(places: Places) -> bytes:
    """One page of places as bytes: commitlog offsets as differences, and only the queues that it has."""
    used, place = renumbered(places.rows["queue"], len(places.queues))
    topics, queues = selection_of(places.queues).taken(used).table()
    rows = places.rows.copy()
    rows["phys"] = np.diff(rows["phys"], prepend=0)
    rows["queue"] = place
    return encode_container(PAGE_KIND, {"topics": topics}, {"queues": queues, "rows": rows})


def decode_places(data: bytes | memoryview, source: str) -> Places:
    """The places of the page ``data``. Raises CorruptionError, which names ``source``, if it is damaged, or
    UnsupportedFormatError."""
    container = decode_container(data, PAGE_KIND, source=source)
    try:
        queues = queues_of(container)
        rows = container.table("rows", PLACE_DTYPE)
        phys = np.cumsum(rows["phys"])
        is_in_order = len(rows) > 0 and not bool((np.diff(phys) < 0).any())
        if not is_in_order or int(rows["queue"].max()) >= len(queues):
            what = (
                "a row names a queue that the page does not list"
                if is_in_order
                else "it has no rows in order"
            )
            raise ValueError(what)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise CorruptionError(f"the page of the index file {source} is damaged: {error!r}") from error
    rows = rows.copy()
    rows["phys"] = phys
    return Places(queues, rows)


def pages_with(pages: Table, phys: int) -> NDArray[np.int64]:
    """The pages (of PAGE_DTYPE) that may name a record at ``phys``: mostly one."""
    first = pages["first_phys"]
    begin = max(0, int(np.searchsorted(first, phys, side="left")) - 1)
    return np.arange(begin, int(np.searchsorted(first, phys, side="right")))
