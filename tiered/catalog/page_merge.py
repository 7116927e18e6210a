"""Merges sequences of pages into one of the next level, streaming, as in a log-structured merge tree.

Encoding, spilling and lookups are in pages.py; page_writer.py schedules merges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from tiered.catalog.pages import Page, PutPage, RunIndex, cut, living_pages, sorted_page, write_pages
from tiered.catalog.state import CatalogState, PageRef, joined_chunks
from tiered.catalog.writer_limits import CatalogLimits
from tiered.model.queue import QueueKey
from tiered.model.tables import copied


def sequence_to_merge(
    pages: Sequence[PageRef], limits: CatalogLimits, *, is_last: bool = False
) -> list[list[PageRef]]:
    """The oldest ``merge_sequences`` sequences of the lowest level that has so many (``merge_spills`` of level 0), or
    nothing. ``is_last``: level 0 does not wait for ``merge_spills``. Pure.

    Pages of one sequence are ordered in ``pages``.
    """
    levels: dict[int, dict[tuple[int, int], list[PageRef]]] = {}
    for page in pages:
        levels.setdefault(page.level, {}).setdefault((page.from_version, page.to_version), []).append(page)
    for level in sorted(levels):
        sequences = levels[level]
        count = limits.merge_sequences if level else limits.merge_spills
        if len(sequences) >= (limits.merge_sequences if is_last else count):
            return [sequences[versions] for versions in sorted(sequences)[:count]]
    return []


def merge(
    index: RunIndex, state: CatalogState, sequences: Sequence[Sequence[PageRef]], runs_max: int, put: PutPage
) -> list[PageRef]:
    """Put one sequence of the next level with all live runs of ``sequences``.

    Streams: at most one page of each sequence and one of the result are in memory.
    """
    level = sequences[0][0].level + 1
    versions = (min(s[0].from_version for s in sequences), max(s[0].to_version for s in sequences))
    streams = [living_pages(index, state, sequence) for sequence in sequences]
    return write_pages(merged_pages(streams, runs_max), level, versions, put)


def sequences_of(pages: Sequence[PageRef]) -> list[list[PageRef]]:
    """The sorted sequences of a state's ``pages``. Pure."""
    found: dict[tuple[int, int, int], list[PageRef]] = {}
    for page in pages:
        found.setdefault((page.level, page.from_version, page.to_version), []).append(page)
    return list(found.values())


def merged_pages(streams: Sequence[Iterator[Page]], runs_max: int) -> Iterator[Page]:
    """All runs of ``streams``, each in order, as one sequence of pages of up to ``runs_max`` runs.

    Holds a page of each stream, and up to three of the result. Pieces carry only their own queues and objects: memory
    does not grow with the length of the streams.
    """
    heads: list[Page | None] = [None] * len(streams)
    pending: list[Page] = []
    while True:
        for number, stream in enumerate(streams):
            while heads[number] is None and (page := next(stream, None)) is not None:
                heads[number] = page if len(page.chunk.runs) else None
        full = [page for page in heads if page is not None]
        if not full:
            break
        counts = iter(_next_runs(full, runs_max))
        for number, head in enumerate(heads):
            if head is not None and (taken := next(counts)):
                pending += cut(_slice(head, 0, taken), runs_max)
                rest = _slice(head, taken, len(head.chunk.runs))
                heads[number] = rest if len(rest.chunk.runs) else None
        if sum(len(page.chunk.runs) for page in pending) >= 2 * runs_max:
            whole = union(pending)
            even = len(whole.chunk.runs) // runs_max * runs_max
            pending = list(cut(_slice(whole, even, len(whole.chunk.runs)), runs_max))
            yield from cut(_slice(whole, 0, even), runs_max)
    if pending:
        yield from cut(union(pending), runs_max)


def _next_runs(heads: Sequence[Page], runs_max: int) -> list[int]:
    """How many runs of each of ``heads`` to take next, about a page in all, or half."""
    share = max(1, runs_max // len(heads))
    limit = min(_at(page, min(share, len(page.chunk.runs)) - 1) for page in heads)
    counts = [_count_up_to(page, limit) for page in heads]
    if sum(counts) >= runs_max // 4:
        return counts
    # The sequences are uneven: not an equal share of each, but up to the end of one.
    limit = min(_at(page, len(page.chunk.runs) - 1) for page in heads)
    counts = [_count_up_to(page, limit) for page in heads]
    while (total := sum(counts)) > runs_max // 2 and (most := max(counts)) > 1:
        limit = _at(heads[counts.index(most)], most // 2 - 1)
        counts = [_count_up_to(page, limit) for page in heads]
        if sum(counts) == total:
            break  # runs of one offset, in a corrupt page
    return counts


def between(pages: Iterator[Page], begin: int, end: int | None) -> Iterator[Page]:
    """Runs [``begin``, ``end``) of ``pages``, which are in order; to the last one if ``end`` is None."""
    at = 0
    for page in pages:
        runs = len(page.chunk.runs)
        first, last = max(0, begin - at), runs if end is None else min(runs, end - at)
        if first == 0 and last == runs:
            yield page
        elif first < last:
            yield from cut(_slice(page, first, last), runs)
        at += runs
        if end is not None and at >= end:
            return


def union(pages: Sequence[Page]) -> Page:
    """Several pages as one sorted page."""
    names = sorted({queue for page in pages for queue in page.queues})
    number = {queue: index for index, queue in enumerate(names)}
    numbers = (np.array([number[queue] for queue in page.queues], np.uint32) for page in pages)
    chunk = joined_chunks(tuple(page.chunk for page in pages))
    runs = chunk.runs if len(pages) > 1 else copied(chunk.runs)
    runs["queue"] = np.concatenate(
        [own[page.chunk.runs["queue"]] for own, page in zip(numbers, pages, strict=True)]
    )
    return sorted_page(names, replace(chunk, runs=runs))


def _slice(page: Page, begin: int, end: int) -> Page:
    return Page(page.queues, replace(page.chunk, runs=page.chunk.runs[begin:end]))


def _at(page: Page, index: int) -> tuple[QueueKey, int]:
    run = page.chunk.runs[index]
    return page.queues[int(run["queue"])], int(run["base_queue_offset"])


def _count_up_to(page: Page, limit: tuple[QueueKey, int]) -> int:
    """Number of leading runs at or below (queue, base offset)."""
    runs, (queue, base) = page.chunk.runs, limit
    below = bisect_left(page.queues, queue)
    # Not np.searchsorted, which copies the whole column first.
    numbers, offsets = (cast("Sequence[int]", runs[name]) for name in ("queue", "base_queue_offset"))
    begin = bisect_left(numbers, below)
    if below == len(page.queues) or page.queues[below] != queue:
        return begin
    return bisect_right(offsets, base, begin, bisect_right(numbers, below, begin))
