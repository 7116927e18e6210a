"""Merges sequences of pages into one of the next level, streaming, as in a log-structured merge tree.

Encoding, spilling and lookups are in pages.py; page_writer.py schedules merges.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from tiered.catalog.pages import (
    Page,
    PutPage,
    RunIndex,
    cut,
    living_pages,
    sequences_of,
    union,
    write_pages,
)
from tiered.catalog.state import CatalogState, PageRef
from tiered.catalog.writer_limits import CatalogLimits
from tiered.model.queue import QueueKey


def sequence_to_merge(
    pages: Sequence[PageRef], limits: CatalogLimits, *, is_last: bool = False
) -> list[list[PageRef]]:
    """The page sequences that are due to be merged into one of the next level: the oldest ``merge_sequences`` of the
    lowest level that has so many (``merge_spills`` of level 0), each with its pages in order; empty if none is due.
    ``is_last``: no commit of data follows, so ``merge_sequences`` of level 0 are enough. Pure.
    """
    levels: dict[int, list[list[PageRef]]] = {}
    for sequence in sequences_of(pages):
        levels.setdefault(sequence[0].level, []).append(sequence)
    for level in sorted(levels):
        count = limits.merge_sequences if level else limits.merge_spills
        if len(levels[level]) >= (limits.merge_sequences if is_last else count):
            by_version = sorted(
                levels[level], key=lambda sequence: (sequence[0].from_version, sequence[0].to_version)
            )
            return by_version[:count]
    return []


def merge(
    index: RunIndex, state: CatalogState, sequences: Sequence[Sequence[PageRef]], runs_max: int, put: PutPage
) -> list[PageRef]:
    """Merge ``sequences`` of catalog pages, without removed and expired runs, into one sequence of the next level.

    Puts its pages, of up to ``runs_max`` runs, with ``put``, and returns their entries for the catalog. At most one
    page of each sequence and three of the result are in memory.
    """
    level = sequences[0][0].level + 1
    versions = (
        min(sequence[0].from_version for sequence in sequences),
        max(sequence[0].to_version for sequence in sequences),
    )
    streams = [living_pages(index, state, sequence) for sequence in sequences]
    return write_pages(merged_pages(streams, runs_max), level, versions, put)


def merged_pages(streams: Sequence[Iterator[Page]], runs_max: int) -> Iterator[Page]:
    """Merges streams of pages, each sorted by queue and offset, into one stream of pages of up to ``runs_max`` runs.

    A page of each stream and up to three of the result are in memory. What waits for a full page carries only its own
    queues and objects, so memory does not grow with the length of the streams.
    """
    unread: list[Page | None] = [None] * len(streams)
    """The rest of the current page of each stream."""
    pending: list[Page] = []
    while True:
        for number, stream in enumerate(streams):
            while unread[number] is None and (page := next(stream, None)) is not None:
                unread[number] = page if len(page.chunk.runs) else None
        current = [page for page in unread if page is not None]
        if not current:
            break
        counts = iter(_next_runs(current, runs_max))
        for number, rest in enumerate(unread):
            if rest is not None and (count := next(counts)):
                pending += cut(_slice(rest, 0, count), runs_max)
                unread[number] = (
                    _slice(rest, count, len(rest.chunk.runs)) if count < len(rest.chunk.runs) else None
                )
        if sum(len(page.chunk.runs) for page in pending) >= 2 * runs_max:
            joined = union(pending)
            full_pages_end = len(joined.chunk.runs) // runs_max * runs_max
            pending = list(cut(_slice(joined, full_pages_end, len(joined.chunk.runs)), runs_max))
            yield from cut(_slice(joined, 0, full_pages_end), runs_max)
    if pending:
        yield from cut(union(pending), runs_max)


def _next_runs(pages: Sequence[Page], runs_max: int) -> list[int]:
    """How many of the first runs of each of ``pages`` are next in a merge: all up to one (queue, offset), chosen so
    that together they are about ``runs_max``, or half of it."""
    share = max(1, runs_max // len(pages))
    limit = min(_position(page, min(share, len(page.chunk.runs)) - 1) for page in pages)
    counts = [_count_up_to(page, limit) for page in pages]
    if sum(counts) >= runs_max // 4:
        return counts
    # The pages cover very different queues: not an equal share of each, but up to the end of the first that ends.
    limit = min(_position(page, len(page.chunk.runs) - 1) for page in pages)
    counts = [_count_up_to(page, limit) for page in pages]
    while (total := sum(counts)) > runs_max // 2 and (most := max(counts)) > 1:
        limit = _position(pages[counts.index(most)], most // 2 - 1)
        counts = [_count_up_to(page, limit) for page in pages]
        if sum(counts) == total:
            break  # only a corrupt page has several runs at one offset
    return counts


def between(pages: Iterator[Page], begin: int, end: int | None) -> Iterator[Page]:
    """The runs number ``begin`` up to, but not including, ``end`` of a sorted stream of ``pages``, as pages; all from
    ``begin`` on if ``end`` is None."""
    before = 0
    for page in pages:
        runs = len(page.chunk.runs)
        first, last = max(0, begin - before), runs if end is None else min(runs, end - before)
        if first == 0 and last == runs:
            yield page
        elif first < last:
            yield from cut(_slice(page, first, last), runs)
        before += runs
        if end is not None and before >= end:
            return


def _slice(page: Page, begin: int, end: int) -> Page:
    """The runs of ``page`` from number ``begin`` up to, but not including, ``end``, with the queues and objects of all
    of the page."""
    return Page(page.queues, replace(page.chunk, runs=page.chunk.runs[begin:end]))


def _position(page: Page, index: int) -> tuple[QueueKey, int]:
    """Where the run number ``index`` is in the order of pages: its queue and first offset."""
    run = page.chunk.runs[index]
    return page.queues[int(run["queue"])], int(run["base_queue_offset"])


def _count_up_to(page: Page, limit: tuple[QueueKey, int]) -> int:
    """How many runs of ``page``, from its first, are at or below the position ``limit`` (queue, first offset)."""
    runs, (queue, offset) = page.chunk.runs, limit
    queue_number = bisect_left(page.queues, queue)
    # Not np.searchsorted, which copies the whole column first.
    numbers, offsets = (cast("Sequence[int]", runs[name]) for name in ("queue", "base_queue_offset"))
    begin = bisect_left(numbers, queue_number)
    if queue_number == len(page.queues) or page.queues[queue_number] != queue:
        return begin  # the queue has no run here
    return bisect_right(offsets, offset, begin, bisect_right(numbers, queue_number, begin))
