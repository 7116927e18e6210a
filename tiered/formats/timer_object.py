"""Objects of timer entries: the hours of delivery of one commit, or of several that were merged.

    pages of entries, by (delivery time, key, physical offset, changes), and of topics | footer: hours, pages, queues

The TimerFlatFile of an hour is the rows that the objects have of it, one behind the other. Pages and footer are
containers. The catalog has the footer's length, so one ranged GET opens an object.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiered.errors import CorruptionError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.queue_names import queues_of
from tiered.model.queue import QueueKey
from tiered.model.queue_roster import selection_of
from tiered.model.tables import Table, begins, concatenated, sorted_ties
from tiered.model.timer import CANCELS, HOUR_MS, EntryKind

PAGE_KIND, FOOTER_KIND = b"RMQTTIMP", b"RMQTTIMF"
PAGE_ROWS = 8_192

ENTRY_DTYPE = np.dtype(
    [
        # When it is delivered; of a cancellation, when its timers are; of a refused message, until when it is listed.
        ("deliver_ms", "<i8"),
        # XXH64 of the unique key, without one the physical offset; of a refused message, the Refusal.
        ("key_hash", "<u8"),
        ("physical_offset", "<i8"),  # of the message
        ("queue_offset", "<i8"),  # of the message; of a cancellation of one place, of the timer there
        ("queue", "<u4"),  # row of the footer's table ``queues``
        ("topic", "<u4"),  # of the page's list ``topics``; a refused message may have an empty one
        ("kind", "<u4"),  # EntryKind
        ("late_hours", "<u4"),  # of a postponed timer, from its time until the broker refused it first
        ("changes", "<u4"),  # how often commands had changed the timer, this entry included
        ("moved_ms", "<i8"),  # how much later than its message says they have set it
    ]
)
"""One entry. Its message is known by its queue, its two offsets, its key, its topic and the time that it says. Entries
of an object are sorted by the first three fields and ``changes``."""
SORTED_BY = ("deliver_ms", "key_hash", "physical_offset", "changes")

HOUR_DTYPE = np.dtype([("hour", "<i8"), ("rows", "<i8"), ("others", "<i8")])
"""``others``: rows that are not of kind TIMER."""
PAGE_DTYPE = np.dtype([("rows", "<i8"), ("stored_bytes", "<i8"), ("first_ms", "<i8"), ("last_ms", "<i8")])
OFFSET_DTYPE = np.dtype([("min_queue_offset", "<i8")])
_NO_OFFSET = 1 << 62
"""Of a queue no message of which is needed: higher than every offset."""
Rows = tuple[Table, Sequence[QueueKey], Sequence[str]]
"""Entries, and what their ``queue`` and their ``topic`` index."""


@dataclass(frozen=True)
class EncodedTimers:
    """An object ready to be put."""

    body: list[bytes]
    size_bytes: int
    tail_bytes: int
    begin_ms: int
    end_ms: int
    entries: int


@dataclass(frozen=True)
class TimerFooter:
    """What an object has. ``hours``: rows by hour. ``page_row``, ``page_at``: where each page begins, and the end of
    the last. ``min_offsets``: of each queue, the first message that an entry needs."""

    queues: Sequence[QueueKey]
    min_offsets: Table
    hours: Table
    pages: Table
    page_row: Table
    page_at: Table


def sorted_entries(entries: Table, sort: Callable[[Table], Table] = np.argsort) -> Table:
    """``entries`` of timers in the order that they have in an object: by SORTED_BY. ``sort`` returns the indices that
    sort an array of times."""
    first = np.ascontiguousarray(entries["deliver_ms"])
    found: Table = entries.take(sorted_ties(sort(first), first, *(entries[name] for name in SORTED_BY[1:])))
    return found


def united(parts: Sequence[Rows]) -> Rows:
    """The entries of all ``parts`` in one table, a copy, with the queues and the topics that they refer to, each once.
    The numbers of queues and topics in the entries are changed to those of the result."""
    # New numbers of queues and of topics: the same code gives both, as an entry refers to both in the same way.
    table, new_numbers, end = (
        concatenated((part[0] for part in parts), ENTRY_DTYPE),
        (dict[Any, int](), dict[Any, int]()),
        0,
    )
    for entries, *lists in parts:
        begin, end = end, end + len(entries)
        for field, names, new in zip(("queue", "topic"), lists, new_numbers, strict=True):
            column = table[field][begin:end]
            used = np.flatnonzero(np.bincount(column, minlength=len(names)))
            numbers = np.zeros(len(names), np.uint32)
            numbers[used] = [new.setdefault(names[number], len(new)) for number in used.tolist()]
            if not np.array_equal(numbers[used], used):
                column[:] = numbers[column]
    return table, list(new_numbers[0]), list(new_numbers[1])


def encode_timers(parts: Iterator[Rows]) -> EncodedTimers:
    """The object that holds the timers of ``parts``, which come in order and have one entry or more: pages of entries,
    then a footer that tells what each page and each hour has."""
    body: list[bytes] = []
    pages: list[tuple[int, int, int, int]] = []
    hours: list[Table] = []
    # Pages share the footer's queues, but have topics of their own. ``least``: by queue, the first offset of a message
    # that an entry needs; cancellations need none.
    numbers, least = dict[QueueKey, int](), np.zeros(0, np.int64)
    for page, queues, topics_of_page in _pages(parts):
        queue = np.array([numbers.setdefault(one, len(numbers)) for one in queues])
        page["queue"] = queue[page["queue"]]
        least = np.append(least, np.full(len(numbers) - len(least), _NO_OFFSET))
        data = encode_container(
            PAGE_KIND, {"topics": topics_of_page}, {"entries": page}, is_packed=True, level=-1
        )
        body.append(data)
        pages.append((len(page), len(data), int(page["deliver_ms"][0]), int(page["deliver_ms"][-1])))
        hours.append(hours_of(page))
        needed = page[~np.isin(page["kind"], CANCELS)]
        np.minimum.at(least, needed["queue"], needed["queue_offset"])
    topics, table = selection_of(list(numbers)).table()
    offsets = np.zeros(len(numbers), OFFSET_DTYPE)
    offsets["min_queue_offset"] = least
    all_hours = joined_hours(hours)
    footer = encode_container(
        FOOTER_KIND,
        {"topics": topics},
        {
            "queues": table,
            "offsets": offsets,
            "pages": np.array(pages, PAGE_DTYPE),
            "hours": all_hours,
        },
        is_packed=True,
        level=1,
    )
    body.append(footer)
    size = sum(map(len, body))
    return EncodedTimers(body, size, len(footer), pages[0][2], pages[-1][3], int(all_hours["rows"].sum()))


def hours_of(page: Table) -> Table:
    """Entries in order by hour: HOUR_DTYPE."""
    ones, is_other = np.ones(len(page), np.int64), page["kind"] != EntryKind.TIMER
    return _sums_by_hour(page["deliver_ms"] // HOUR_MS, ones, is_other)


def joined_hours(tables: Sequence[Table]) -> Table:
    """The hours of parts that follow each other."""
    joined = np.concatenate(tables)
    return _sums_by_hour(joined["hour"], joined["rows"], joined["others"])


def _sums_by_hour(hours: Table, rows: Table, others: Table) -> Table:
    """A HOUR_DTYPE table with each of the sorted ``hours`` once, and for it the sums of ``rows`` (entries) and of
    ``others``: how many of these are no timers, but cancellations and the like."""
    first = np.flatnonzero(np.diff(hours, prepend=-1))
    sums = np.empty(len(first), HOUR_DTYPE)
    sums["hour"] = hours[first]
    sums["rows"], sums["others"] = (
        np.add.reduceat(rows, first),
        np.add.reduceat(others, first, dtype=np.int64),
    )
    return sums


def _pages(parts: Iterator[Rows]) -> Iterator[Rows]:
    """The entries of ``parts``, divided again: PAGE_ROWS in each but the last, as copies."""
    rest: Rows = np.zeros(0, ENTRY_DTYPE), (), ()
    for part in parts:
        rest = united([rest, part]) if len(rest[0]) else part
        while len(rest[0]) >= PAGE_ROWS:
            yield united([(rest[0][:PAGE_ROWS], *rest[1:])])
            rest = rest[0][PAGE_ROWS:], *rest[1:]
    if len(rest[0]):
        yield united([rest])


def decode_footer(data: bytes, *, source: str, entries: int, pages_bytes: int) -> TimerFooter:
    """Decode the footer of an object of timers that, by the catalog, has ``entries`` in pages of ``pages_bytes``
    together. ``source`` names it in messages. Raises CorruptionError if it is damaged, or if it has something else."""
    container = decode_container(data, FOOTER_KIND, source=source)
    try:
        queues = queues_of(container)
        hours, pages = container.table("hours", HOUR_DTYPE), container.table("pages", PAGE_DTYPE)
        least = container.table("offsets", OFFSET_DTYPE)["min_queue_offset"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptionError(
            f"{source}: the footer of this object of timers is damaged: {error!r}"
        ) from error
    page_row, page_at = begins(pages["rows"]), begins(pages["stored_bytes"])
    wanted = (entries, entries, pages_bytes, len(queues))
    if (int(page_row[-1]), int(hours["rows"].sum()), int(page_at[-1]), len(least)) != wanted:
        raise CorruptionError(
            f"{source} is damaged: this object of timers has other numbers of entries than the catalog has for it"
        )
    return TimerFooter(queues, least, hours, pages, page_row, page_at)


def decode_page(data: bytes, *, source: str, rows: int, queues: Sequence[QueueKey]) -> Rows:
    """The entries of a page of an object of timers, whose footer says that the page has ``rows`` entries and the object
    ``queues``; with these queues and the page's topics, to which entries refer. Raises CorruptionError."""
    container = decode_container(data, PAGE_KIND, source=source)
    try:
        entries, topics = container.table("entries", ENTRY_DTYPE), [*map(str, container.header["topics"])]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: this page of timers is damaged: {error!r}") from error
    last = [int(entries[field].max(initial=0)) for field in ("queue", "topic")]
    if len(entries) != rows or last[0] >= len(queues) or last[1] >= len(topics):
        raise CorruptionError(f"{source}: this page of timers does not match the footer of its object")
    return entries, queues, topics
