"""Pulls that a reader answers out of what it has in hand, or has after one look at memory: calls, no coroutines.

Owns the order of these steps, and what is done after such an answer. Does not own what is in hand (readers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fetcher.prefetch.prefetch_range import Pulled
from fetcher.prefetch.prefetcher import Prefetcher
from fetcher.prefetch.readers import InHand, Reader, ReaderKey, Readers
from fetcher.pulls.memory_pull_next_run import BeyondHand
from fetcher.rows.block_fetch import BlockSource, Held
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.queue_view import QueueView
from fetcher.rows.tag_filter import MessageFilter

PLACES_MAX = 16_384


@dataclass
class FetcherCounters:
    """Sums since the start. ``from_hand``: pulls answered by slicing; ``waited``: pulls that waited for the store."""

    pulls: int = 0
    from_hand: int = 0
    waited: int = 0
    messages: int = 0
    retried: int = 0


class HandPulls:
    """Thread-safe. ``unread_s``: readers that have not pulled for so long keep nothing in hand."""

    def __init__(
        self,
        source: BlockSource,
        catalog: CatalogView,
        readers: Readers,
        prefetcher: Prefetcher,
        counters: FetcherCounters,
        *,
        clock_s: Callable[[], float],
        unread_s: float,
    ) -> None:
        self._source, self._catalog = source, catalog
        self._readers, self._prefetcher, self._counters = readers, prefetcher, counters
        self._clock_s, self._unread_s = clock_s, unread_s
        self._beyond = BeyondHand(source, catalog)
        self._places: dict[tuple[str, int, str], tuple[QueueView, Reader]] = {}
        """Who read where by name, in the version known last: what need not be looked for each time."""
        self._places_of = catalog.state
        readers.on_forgotten = self._forget

    def find(
        self, topic: str, queue_id: int, offset: int, count: int, max_bytes: int, group: str
    ) -> InHand | None:
        """See TieredMessageFetcher.in_hand."""
        catalog = self._catalog
        time_s = self._clock_s()
        catalog.look(time_s)
        name = topic, queue_id, group
        place = self._places.get(name)
        if place is None or place[0].state is not catalog.state:
            view = catalog.view(catalog.state, (topic, queue_id, None))
            reader = None if view is None else self._readers.find(ReaderKey(group, view.queue))
            if view is None or reader is None or view.is_hidden:
                return None
            if len(self._places) >= PLACES_MAX or view.state is not self._places_of:
                self._places, self._places_of = {}, view.state  # who stays away keeps no old version
            # By the reader's own names: those of this pull need not be kept.
            place = self._places[reader.name[1], queue_id, reader.name[0]] = view, reader
        view, reader = place
        slices = reader.held.slices
        if slices is not None and slices.view is view:
            first = offset - slices.base
            end = first + count
            if 0 <= first < end <= len(slices.ends):
                begin_byte, end_byte = slices.starts[first], slices.ends[end - 1]
                if end_byte - begin_byte <= max_bytes:
                    self._counters.pulls += 1
                    self.answered(reader, view, offset, offset + count, count, time_s)
                    body = (slices.data[begin_byte:end_byte],)
                    return InHand(body, count, offset + count, view.min_offset, view.max_offset)
        found = reader.body_from_hand(view, offset, count, max_bytes)
        if found is not None:
            reader.slice(view)
            self._counters.pulls += 1
            self.answered(reader, view, offset, found.next_offset, found.records, time_s)
            return found
        across = reader.body_across(view, offset, count, max_bytes, self._source.block_in_memory)
        bytes_per_offset = None
        if across is None:
            beyond = self._beyond.find(reader, view, offset, count, max_bytes)
            if beyond is None:
                self._places.pop(name, None)  # perhaps the reader was forgotten and is another now
                return None
            found, held, bytes_per_offset = beyond
        else:
            found, held = across
        self._counters.pulls += 1
        self._answered_across(reader, view, offset, found, held, bytes_per_offset, time_s)
        return found

    def _forget(self, reader: Reader) -> None:
        group, topic, queue_id = reader.name
        self._places.pop((topic, queue_id, group), None)

    def answered(
        self, reader: Reader, view: QueueView, offset: int, next_offset: int, messages: int, time_s: float
    ) -> None:
        """The block in hand had all of it."""
        self._counters.from_hand += 1
        self._counters.messages += messages
        self._prefetcher.pulled_in_hand(reader, offset, next_offset, time_s)
        self._readers.used(reader, time_s)
        self.go_on(reader, view, time_s, None)

    def _answered_across(
        self,
        reader: Reader,
        view: QueueView,
        offset: int,
        found: InHand,
        held: Held,
        bytes_per_offset: float | None,
        time_s: float,
    ) -> None:
        """There is another block in hand."""
        self._counters.from_hand += 1
        self._counters.messages += found.records
        self._readers.hold(reader, held)
        self._readers.used(reader, time_s)
        rows = held.rows
        assert rows is not None
        pulled = Pulled(offset, found.next_offset, rows.end, rows.block_bytes[-1], time_s)
        self._prefetcher.pulled(reader, pulled, bytes_per_offset)
        self.go_on(reader, view, time_s, None)

    def go_on(
        self, reader: Reader, view: QueueView, time_s: float, message_filter: MessageFilter | None
    ) -> None:
        """After any answer: read ahead, and let go of what nobody comes for."""
        if reader.window.is_low(time_s):
            self._prefetcher.fetch_ahead(reader, view, message_filter, inline=message_filter is None)
        if self._prefetcher.sweep(time_s):
            self._readers.let_go_unused_since(time_s - self._unread_s)
