"""Streaming merge of index files: at most a bounded piece of each input is in memory."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tiered.archive.index.footer import Covered
from tiered.archive.index.items import ITEM_DTYPE
from tiered.archive.index.layout import PAGE_ITEMS, Shape, decode_pages
from tiered.archive.index.order import item_key, position_after, sorted_items
from tiered.archive.index.places import Places, decode_places
from tiered.model.tables import Table, concatenated

Read = Callable[[str, int, int], bytes]
"""(key, offset, length) -> exactly these bytes."""


def file_items(read: Read, shape: Shape, *, pages_at_once: int) -> Iterator[Table]:
    """All items of a file in order, piece by piece. Raises CorruptionError and the errors of ``read``."""
    for first in range(0, shape.pages, pages_at_once):
        end = min(first + pages_at_once, shape.pages)
        yield decode_pages(shape, first, end, read(shape.key, *shape.page_range(first, end)))


def file_places(read: Read, shape: Shape, covered: Covered) -> Iterator[Places]:
    """The pages of places of a file. Raises CorruptionError and the errors of ``read``."""
    for page in range(len(covered.pages)):
        offset, length = covered.page_range(shape, page)
        yield decode_places(
            read(shape.key, offset, length),
            f"the places in bytes {offset} to {offset + length - 1} of the index file {shape.key}",
        )


def merged_items(read: Read, shapes: Sequence[Shape], *, items_in_memory: int) -> Iterator[Table]:
    """Merge the items of several index files, each in order, into one stream of tables in order, in which equal items
    are there once. About ``items_in_memory`` of them are in memory."""
    pages = max(1, items_in_memory // PAGE_ITEMS // max(1, 2 * len(shapes)))
    streams = [file_items(read, shape, pages_at_once=pages) for shape in shapes]
    unread = [np.zeros(0, ITEM_DTYPE)] * len(streams)  # items of each file that are read and not merged
    is_open = [True] * len(streams)
    while True:
        for number, stream in enumerate(streams):
            while is_open[number] and len(unread[number]) == 0:
                items = next(stream, None)
                is_open[number] = items is not None
                unread[number] = unread[number] if items is None else items
        if not any(map(len, unread)):
            return
        # Behind the smallest of the last items, files that are still open may have more.
        lasts = [items[-1] for items, more in zip(unread, is_open, strict=True) if more]
        limit = min(lasts, key=item_key, default=None)
        counts = [len(items) if limit is None else position_after(items, limit) for items in unread]
        yield sorted_items(
            concatenated((items[:count] for items, count in zip(unread, counts, strict=True)), ITEM_DTYPE)
        )
        unread = [items[count:] for items, count in zip(unread, counts, strict=True)]
