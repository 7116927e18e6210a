"""Which pages of an archive a round of compaction replaces: whole sequences, or a part of large ones.

Pages are sorted by queue. Of a large sequence, a round takes consecutive ones with as many runs as fit in memory: some
queues in all versions. Sequences that are too large together may be merged by the first round.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.garbage import digests
from tiered.catalog.page_merge import between, merged_pages
from tiered.catalog.pages import Page, RunIndex, living_pages, sequences_of, sorted_page
from tiered.catalog.state import CatalogState, PageRef, RunChunk, joined_chunks, selected
from tiered.catalog.writer_limits import CatalogLimits


@dataclass(frozen=True)
class ObjectRuns:
    """Objects by digest, ascending, and their runs."""

    digests: NDArray[np.uint64]
    runs: NDArray[np.int64]

    def of(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """The runs of each of ``keys``."""
        wanted = digests(keys)
        at = np.minimum(np.searchsorted(self.digests, wanted), len(self.digests) - 1)
        found: NDArray[np.int64] = np.where(self.digests[at] == wanted, self.runs[at], 0)
        return found


class ObjectRunCounter:
    """Counts runs, and keeps the counts of pages that still exist."""

    def __init__(self) -> None:
        self._pages: dict[str, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}

    def count(
        self, index: RunIndex, state: CatalogState, pages: Sequence[PageRef], memory: Iterable[Page] = ()
    ) -> ObjectRuns:
        """How many living runs of each object are in ``pages`` of the catalog (at least one) and in ``memory``."""
        if state.has_expired_runs or len(state.tombstones):
            self._pages.clear()  # a run of a known page may have died
        exists = {ref.key for ref in state.pages}
        self._pages = {key: known for key, known in self._pages.items() if key in exists}
        for ref in pages:
            if ref.key not in self._pages:
                self._pages[ref.key] = _counted(next(living_pages(index, state, [ref])))
        parts = [*(self._pages[ref.key] for ref in pages), *map(_counted, memory)]
        unique_digests, number = np.unique(np.concatenate([part for part, _ in parts]), return_inverse=True)
        runs = np.bincount(number, weights=np.concatenate([runs for _, runs in parts]))
        return ObjectRuns(unique_digests, runs.astype(np.int64))


def _counted(page: Page) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    chunk = page.chunk
    runs = np.bincount(chunk.runs["object"], minlength=len(chunk.objects))
    return digests(chunk.object_keys)[chunk.objects["key"]], runs


PAGE_RUNS = CatalogLimits().page_runs_max
SIMILAR = 8
"""The largest of the sequences to be merged has at most so many times the runs of the others: else each pass would
write it again. Unless it has so many runs of each queue: compaction leaves few of them."""


@dataclass(frozen=True)
class PageRange:
    """The pages that a round replaces, and ``memory_runs`` in memory up to ``spilled_version``, or 0.

    It compacts all of these runs; if ``pages`` are several sequences to be merged, runs [``begin``, ``end``) in the
    order of queues. ``others``: pages of the same sequence that stay. ``share``: of the runs from here on.
    """

    pages: list[PageRef]
    spilled_version: int = 0
    memory_runs: int = 0
    begin: int = 0
    end: int | None = None
    others: list[PageRef] = field(default_factory=list)
    share: float = 1.0

    @property
    def runs(self) -> int:
        """How many it has at most."""
        total = _runs(self.pages) + self.memory_runs
        return total if self.end is None else max(0, min(self.end, total) - self.begin)

    @property
    def level(self) -> int:
        """Level of the pages that replace it."""
        return max((page.level for page in self.pages), default=0) + (self.end is not None)

    @property
    def is_partial(self) -> bool:
        """Whether runs of the same versions may be outside of it."""
        return bool(self.others) or self.end is not None

    def compacted(self, index: RunIndex, state: CatalogState) -> Iterator[Page]:
        """The living runs that it compacts."""
        # Small pages when sequences are merged: three are in memory twice, beside the runs of the round.
        return between(self._living(index, state, max(1, PAGE_RUNS // 4)), self.begin, self.end)

    def copied(self, index: RunIndex, state: CatalogState, begin: int, end: int | None) -> Iterator[Page]:
        """Living runs [``begin``, ``end``) of sequences to be merged, in the order of queues."""
        return between(self._living(index, state, PAGE_RUNS), begin, end)

    def _living(self, index: RunIndex, state: CatalogState, runs_max: int) -> Iterator[Page]:
        if self.end is None:
            return chain(living_pages(index, state, self.pages), self.memory(state))
        streams = [living_pages(index, state, sequence) for sequence in sequences_of(self.pages)]
        return merged_pages([*streams, self.memory(state)], runs_max)

    def memory(self, state: CatalogState) -> Iterator[Page]:
        """Its runs in memory, as a page if there are any."""
        found = older_memory(state, self.spilled_version)
        if len(found.runs):
            yield sorted_page(state.directory.roster.first(len(state.table)), found)


def ranges_of(state: CatalogState, before_version: int, runs_max: int) -> Iterator[list[PageRange]]:
    """Divide the pages of the catalog into ranges, each for one round of compaction, of about ``runs_max`` runs. Yields
    lists, the oldest versions first: the ranges of a list have the same versions and different queues. Only versions
    below ``before_version`` take part. A sequence is a list of pages that cover the same versions, sorted by queue."""
    sequences = sorted(sequences_of(state.pages), key=lambda sequence: sequence[0].from_version)
    if any(before[0].to_version >= after[0].from_version for before, after in pairwise(sequences)):
        return  # versions of two sequences overlap: no range of versions has pages of its own
    # Queries by key read every object of the versions that no index file covers yet: these objects are not replaced.
    last = min(before_version - 1, state.indexed_version if state.indexes else before_version - 1)
    memory = older_versions(state, last)
    # Runs in memory, which no page has yet, take part if they are all of one log history: with the newest pages of
    # that history, or else as a range of their own. ``newest``: their last version; 0: they have no range to come.
    newest, runs, memory_history = 0, len(memory), None
    if len(memory) and _histories(state, int(memory.min())) == _histories(state, int(memory.max())):
        newest, memory_history = int(memory.max()), _histories(state, int(memory.min()))
    groups = list(_neighbours(state, sequences, last, runs_max))
    for number, (group, history) in enumerate(groups):
        pages = [page for sequence in group for page in sequence]
        if len(group) == 1 and _runs(pages) > runs_max:
            yield _cut(pages, runs_max)
            continue
        in_memory = (0, 0)  # the last version and the number of the runs in memory that the group takes
        is_last = number + 1 == len(groups)
        if newest and history == memory_history and is_last and _fit(group, runs, runs_max):
            in_memory, newest = (newest, runs), 0
        if _runs(pages) <= runs_max:
            yield [PageRange(pages, *in_memory)]
        else:
            yield _merged(pages, *in_memory, runs_max)
    if newest:
        yield [PageRange([], newest, runs)]


def older_memory(state: CatalogState, version: int) -> RunChunk:
    """Runs in memory that versions up to ``version`` added."""
    older = [chunk.runs["version"] <= version for chunk in state.chunks]
    return joined_chunks(tuple(map(selected, state.chunks, older)))


def older_versions(state: CatalogState, version: int) -> NDArray[np.int64]:
    """The version of each run of ``older_memory``, without a copy of the runs."""
    versions = np.concatenate([np.zeros(0, np.int64), *(chunk.runs["version"] for chunk in state.chunks)])
    found: NDArray[np.int64] = versions[versions <= version]
    return found


def _neighbours(
    state: CatalogState, sequences: list[list[PageRef]], last: int, runs_max: int
) -> Iterator[tuple[list[list[PageRef]], tuple[int, int]]]:
    """Groups of neighbouring ``sequences`` that one round of compaction takes, each with its log history as
    ``_histories`` numbers it. A sequence is a list of catalog pages that cover the same versions. A group is inside one
    log history, ends at version ``last``, and has up to ``runs_max`` runs, or sequences that are worth to be merged."""

    def history_of(sequence: list[PageRef]) -> tuple[int, int] | None:
        first, newest = (
            _histories(state, getattr(sequence[0], name)) for name in ("from_version", "to_version")
        )
        return first if first == newest and sequence[0].to_version <= last else None

    for history, neighbours in groupby(sequences, history_of):
        if history is None:
            continue
        groups: list[list[list[PageRef]]] = [[]]
        for sequence in reversed(list(neighbours)):  # the newest are small
            wider = [sequence, *groups[-1]]
            sizes = [_runs(one) for one in wider]
            if sum(sizes) <= runs_max or len(wider) == 1 or is_merged(wider, runs_max, len(state.table)):
                groups[-1] = wider
            else:
                groups.append([sequence])
        yield from ((group, history) for group in reversed(groups))


def is_merged(group: list[list[PageRef]], runs_max: int, queues: int) -> bool:
    """Whether it is worth to merge the sequences (lists of pages) of ``group``, so that the largest is written again
    for the others. ``queues``: of the archive, of each of which compaction leaves few runs. Pure."""
    sizes = [_runs(one) for one in group]
    is_compacted = max(sizes) < SIMILAR * queues
    return _held_runs(group) <= runs_max and (_are_similar(sizes) or not is_compacted)


def _are_similar(sizes: Sequence[int]) -> bool:
    return max(sizes) <= SIMILAR * (sum(sizes) - max(sizes))


def _held_runs(group: list[list[PageRef]]) -> int:
    """How many runs memory holds while the sequences of ``group`` are merged: a page of each."""
    return sum(max(page.runs for page in one) for one in group)


def _fit(group: list[list[PageRef]], memory_runs: int, runs_max: int) -> bool:
    """Whether runs in memory may take part: those of a whole group do; when it is merged, only if there is room."""
    is_whole = sum(map(_runs, group)) <= runs_max
    return is_whole or _held_runs(group) + memory_runs <= runs_max


def _cut(sequence: list[PageRef], runs_max: int) -> list[PageRange]:
    """Divide the pages of one large sequence into ranges of consecutive pages, each with at most ``runs_max`` runs,
    unless one page has more."""
    ranges: list[PageRange] = []
    total, begin = _runs(sequence), 0
    sums = np.cumsum([0, *(page.runs for page in sequence)])
    while begin < len(sequence):
        end = max(begin + 1, int(np.searchsorted(sums, sums[begin] + runs_max, side="right")) - 1)
        others = [*sequence[:begin], *sequence[end:]]
        runs, left = int(sums[end] - sums[begin]), total - int(sums[begin])
        ranges.append(PageRange(sequence[begin:end], others=others, share=runs / left))
        begin = end
    return ranges


def _merged(pages: list[PageRef], spilled_version: int, memory_runs: int, runs_max: int) -> list[PageRange]:
    """Ranges of ``runs_max`` runs each of several sequences that are merged, and of runs in memory up to
    ``spilled_version``."""
    total = _runs(pages) + memory_runs
    bounds = [*range(0, total, runs_max), total]
    return [
        PageRange(pages, spilled_version, memory_runs, begin, end, share=(end - begin) / (total - begin))
        for begin, end in pairwise(bounds)
    ]


def _runs(pages: Iterable[PageRef]) -> int:
    return sum(page.runs for page in pages)


def _histories(state: CatalogState, version: int) -> tuple[int, int]:
    """Two numbers that are equal for two catalog versions if no log history begins or branches off between them: runs
    of such versions may be joined."""
    histories = state.log_histories
    return (
        sum(one.version <= version for one in histories),
        sum(one.common_version < version for one in histories),
    )
