"""Which versions of an archive a round of compaction takes: whole sequences of pages, or a piece of a large one.

A sequence that merges have made large has more runs than fit in memory. A round then takes only some of its versions,
and the others go, page by page, into sequences of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tiered.catalog.page_merge import full_pages, sequences_of, union
from tiered.catalog.pages import Page, PutPage, RunIndex, cut, write_pages
from tiered.catalog.state import EMPTY_CHUNK, CatalogState, PageRef, RunChunk, selected
from tiered.errors import CorruptionError

REST_SEQUENCES_MAX = 4
"""Sequences of later versions that a round leaves of a large one: a page of each is in memory."""


@dataclass(frozen=True)
class Versions:
    """Versions ``first`` to ``last`` and how many runs they have."""

    first: int
    last: int
    runs: int


@dataclass(frozen=True)
class VersionRange:
    """Consecutive versions inside one log history: of ``pages`` those in ``within``, or all of them, and the runs in
    memory up to ``spilled_version``, or 0. ``rests``: the other versions of the pages. ``share``: of the runs that
    ``pages`` have from ``within`` on."""

    pages: list[PageRef]
    spilled_version: int = 0
    within: Versions | None = None
    rests: tuple[Versions, ...] = ()
    share: float = 1.0


def ranges_of(
    state: CatalogState, index: RunIndex, before_version: int, runs_max: int
) -> Iterator[list[VersionRange]]:
    """Ranges with about ``runs_max`` runs, oldest first; several are pieces of the same pages: only one of them can be
    taken. Only versions below ``before_version`` take part."""
    sequences = sorted(sequences_of(state.pages), key=lambda sequence: sequence[0].from_version)
    if any(before[0].to_version >= after[0].from_version for before, after in pairwise(sequences)):
        return  # versions of two sequences overlap: no range of versions has pages of its own
    last = min(before_version - 1, state.indexed_version if state.indexes else before_version - 1)
    where: tuple[int, int] | None = None
    pages: list[PageRef] = []
    for sequence in sequences:
        here = _histories(state, sequence[0].from_version)
        is_inside = here == _histories(state, sequence[0].to_version) and sequence[0].to_version <= last
        if pages and (here != where or not is_inside or _runs(pages) + _runs(sequence) > runs_max):
            yield [VersionRange(pages)]
            pages = []
        where = here
        if is_inside and _runs(sequence) > runs_max:
            yield _pieces(index, sequence, runs_max)
        elif is_inside:
            pages += sequence
    memory = older_memory(state, last).runs["version"]
    if len(memory) and _histories(state, int(memory.min())) == _histories(state, int(memory.max())):
        if pages and where != _histories(state, int(memory.min())):
            yield [VersionRange(pages)]
            pages = []
        yield [VersionRange(pages, int(memory.max()))]
    elif pages:
        yield [VersionRange(pages)]


def older_memory(state: CatalogState, version: int) -> RunChunk:
    """Runs in memory that versions up to ``version`` added."""
    return selected(state.memory, state.memory.runs["version"] <= version)


def within(page: Page, versions: Versions | None) -> Page:
    """The runs of ``page`` that ``versions`` added; all of them if it is None."""
    if versions is None:
        return page
    version = page.chunk.runs["version"]
    mine = np.flatnonzero((version >= versions.first) & (version <= versions.last))
    if len(mine) == len(version):
        return page
    piece = Page(page.queues, selected(page.chunk, mine))
    return next(cut(piece, len(mine))) if len(mine) else Page([], EMPTY_CHUNK)


def write_rests(
    pages: Iterator[Page], rests: Sequence[Versions], level: int, runs_max: int, put: PutPage
) -> list[PageRef]:
    """Put the runs of ``pages``, which are in order, that ``rests`` added: each as a sequence of pages of up to
    ``runs_max`` runs."""
    refs: list[PageRef] = []
    pending: list[list[Page]] = [[] for _ in rests]

    def write(number: int, found: Iterator[Page]) -> None:
        refs.extend(write_pages(found, level, (rests[number].first, rests[number].last), put))

    for page in pages:
        for number, own in enumerate(rests):
            piece = within(page, own)
            if len(piece.chunk.runs):
                pending[number].append(piece)
            if sum(len(one.chunk.runs) for one in pending[number]) >= runs_max:
                full, pending[number] = full_pages(pending[number], runs_max)
                write(number, full)
    for number, left in enumerate(pending):
        if left:
            write(number, cut(union(left), runs_max))
    return refs


def _pieces(index: RunIndex, sequence: list[PageRef], runs_max: int) -> list[VersionRange]:
    """Consecutive versions of at most ``runs_max`` runs, unless one has more."""
    first, last = sequence[0].from_version, sequence[0].to_version
    counts = np.zeros(last - first + 1, np.int64)
    for ref in sequence:
        versions = index.read_page(ref).chunk.runs["version"] - first
        if int(versions.min()) < 0 or int(versions.max()) >= len(counts):
            raise CorruptionError(f"{ref.key} has runs of other versions than [{first}, {last}]")
        counts += np.bincount(versions, minlength=len(counts))
    sums = np.concatenate([[0], np.cumsum(counts)])
    pieces: list[Versions] = []
    begin = 0
    while begin < len(counts):
        end = max(begin + 1, int(np.searchsorted(sums, sums[begin] + runs_max, side="right")) - 1)
        pieces.append(Versions(first + begin, first + end - 1, int(sums[end] - sums[begin])))
        begin = end
    return [
        VersionRange(
            sequence, 0, piece, (*_joined(pieces[:at], 1), *_joined(pieces[at + 1 :], REST_SEQUENCES_MAX)),
            piece.runs / max(1, sum(later.runs for later in pieces[at:])),
        )
        for at, piece in enumerate(pieces)
    ]  # fmt: skip


def _joined(pieces: Sequence[Versions], count_max: int) -> list[Versions]:
    """``pieces`` as at most ``count_max``."""
    bounds = np.linspace(0, len(pieces), min(count_max, len(pieces)) + 1).astype(int).tolist()
    parts = [pieces[begin:end] for begin, end in pairwise(bounds)]
    return [Versions(part[0].first, part[-1].last, sum(one.runs for one in part)) for part in parts]


def _runs(pages: Sequence[PageRef]) -> int:
    return sum(page.runs for page in pages)


def _histories(state: CatalogState, version: int) -> tuple[int, int]:
    """Equal for versions between which no log history begins or branches off."""
    histories = state.log_histories
    return (
        sum(one.version <= version for one in histories),
        sum(one.common_version < version for one in histories),
    )
