"""Objects with rows on both sides of a new log history's begin, and the objects that replace them.

Compaction joins the rows of many commits. Where the broker's log diverges inside a joined object, the rows below are in
both logs. The owner puts them as an object of its epoch (uploader/common_rows.py), and the pages of the new history
name it in the place of the joined one: no object has rows on both sides. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.pages import Page, referenced_keys
from tiered.catalog.state import CatalogState, RunChunk, joined
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_SUPERSEDED, RUN_DTYPE, RunKind, Table, concatenated

_OF_BEGIN = ("kind", "version", "base_queue_offset", "base_byte")


@dataclass(frozen=True)
class JoinedObject:
    """``place`` is its OBJECT_DTYPE row. ``runs`` (RUN_DTYPE): those with rows below the begin, by ordinal;
    ``runs["queue"]`` indexes ``queues``."""

    key: str
    place: np.void
    queues: Sequence[QueueKey]
    runs: Table


@dataclass(frozen=True)
class CommonRows:
    """The object with the rows of a JoinedObject below the begin: its key, its OBJECT_DTYPE row, and its runs in the
    order of the joined object's; of these ``queue`` and ``object`` do not count."""

    key: str
    place: np.void
    runs: Table


WriteCommonRows = Callable[[CatalogState, int, Sequence[JoinedObject], list[str]], Sequence[CommonRows]]
"""(state, begin of the new history, objects, unnamed): puts an object for each. A key is in ``unnamed`` before its PUT:
it is garbage until a commit names it. May be called again for the same objects. Raises UnavailableError when the call
may be repeated."""


def refuse_joined(
    _state: CatalogState, phys: int, _objects: Sequence[JoinedObject], _unnamed: list[str]
) -> Sequence[CommonRows]:
    """The WriteCommonRows of a writer that has none."""
    raise CommitInvalidError(
        f"the broker's log diverges at {phys} from the archive, inside objects that compaction joined",
        hint="start the broker with its newer log, or archive to another archive.url; this archive stays readable",
    )


def compared_runs(state: CatalogState, page: Page) -> NDArray[np.bool_]:
    """Which runs of ``page`` have physical offsets of the current log: not those of queues that ended with an earlier
    one."""
    rows = state.directory.rows(page.queues, len(state.table))
    ended = (rows >= 0) & (state.table["flags"][rows] & QUEUE_SUPERSEDED != 0)
    found: NDArray[np.bool_] = ~ended[page.chunk.runs["queue"]]
    return found


def joined_objects(state: CatalogState, pages: Callable[[], Iterable[Page]], phys: int) -> list[JoinedObject]:
    """The objects of ``pages``, read twice, that have rows on both sides of ``phys``."""
    below: set[str] = set()
    above: set[str] = set()
    for page in pages():
        compared = compared_runs(state, page)
        below.update(_keys(page.chunk, compared & (page.chunk.runs["min_phys"] < phys)))
        above.update(_keys(page.chunk, compared & (page.chunk.runs["end_phys"] > phys)))
    wanted = below & above
    parts: dict[str, list[tuple[Sequence[QueueKey], RunChunk]]] = {key: [] for key in sorted(wanted)}
    for page in pages() if wanted else ():
        found = np.array([key in wanted for key in _names(page.chunk)], np.bool_)
        mine = found[page.chunk.runs["object"]] & (page.chunk.runs["min_phys"] < phys)
        mine &= compared_runs(state, page)
        for number in np.unique(page.chunk.runs["object"][mine]).tolist():
            runs = page.chunk.runs[mine & (page.chunk.runs["object"] == number)]
            place = page.chunk.objects[number : number + 1]
            parts[_names(page.chunk)[number]].append((page.queues, RunChunk(runs, place, ())))
    return [_joined_object(key, found) for key, found in parts.items()]


def _joined_object(key: str, parts: Sequence[tuple[Sequence[QueueKey], RunChunk]]) -> JoinedObject:
    queues: list[QueueKey] = []
    tables = []
    for names, chunk in parts:
        used, number = np.unique(chunk.runs["queue"], return_inverse=True)
        runs = chunk.runs.copy()
        runs["queue"] = number + len(queues)
        queues += [names[at] for at in used.tolist()]
        tables.append(runs)
    runs = concatenated(tables, RUN_DTYPE)
    return JoinedObject(key, parts[0][1].objects[0], queues, runs[np.argsort(runs["ordinal"], kind="stable")])


class Replacements:
    """The common rows of joined objects, by object and ordinal of each run. Raises CommitInvalidError where they are
    not what the joined objects have below ``phys``."""

    def __init__(self, objects: Sequence[JoinedObject], common: Sequence[CommonRows], phys: int) -> None:
        self._runs: dict[str, Mapping[int, tuple[CommonRows, int]]] = {}
        for source, made in zip(objects, common, strict=True):
            _check(source, made, phys)
            ordinals = source.runs["ordinal"].tolist()
            self._runs[source.key] = {ordinal: (made, at) for at, ordinal in enumerate(ordinals)}
        self.keys = [made.key for made in common]

    def applied(self, chunk: RunChunk) -> RunChunk:
        """``chunk`` with common rows in the place of joined runs, but of those above the begin as a whole; itself if
        there are none."""
        names = _names(chunk)
        joined_numbers = [number for number, key in enumerate(names) if key in self._runs]
        mine = np.flatnonzero(np.isin(chunk.runs["object"], joined_numbers)).tolist()
        if not mine:
            return chunk
        runs, new, numbers = chunk.runs.copy(), list[CommonRows](), dict[str, int]()
        for at in mine:
            found = self._runs[names[int(runs["object"][at])]].get(int(runs["ordinal"][at]))
            if found is None:
                continue
            made, row = found
            if made.key not in numbers:
                numbers[made.key] = len(chunk.objects) + len(new)
                new.append(made)
            queue = runs["queue"][at]
            runs[at] = made.runs[row]
            runs["queue"][at], runs["object"][at] = queue, numbers[made.key]
        places = np.array([made.place for made in new], chunk.objects.dtype)
        places["key"] = np.arange(len(new)) + len(chunk.object_keys)
        objects = np.concatenate([chunk.objects, places])
        return RunChunk(runs, objects, (*chunk.object_keys, *(made.key for made in new)))


def _check(source: JoinedObject, made: CommonRows, phys: int) -> None:
    before, after = source.runs, made.runs
    whole = before["end_phys"] <= phys
    same = [name for name in before.dtype.names or () if name not in ("queue", "object", "ordinal")]
    fits = (
        len(before) == len(after)
        and all((before[name] == after[name]).all() for name in _OF_BEGIN)
        and all((before[name] == after[name])[whole].all() for name in same)
        and bool((after["end_phys"] <= phys).all() and (after["rows"] > 0).all())
        and bool((after["rows"] < before["rows"])[~whole].all())
        and bool((after["end_queue_offset"] < before["end_queue_offset"])[~whole].all())
        and bool(((after["byte_count"] > 0) | (after["kind"] == RunKind.LMQ)).all())
    )
    if not fits:
        raise CommitInvalidError(f"{made.key} has not the rows of {source.key} below {phys}")


def _names(chunk: RunChunk) -> list[str]:
    """The key of each object."""
    return [chunk.object_keys[number] for number in chunk.objects["key"].tolist()]


def _keys(chunk: RunChunk, which: NDArray[Any]) -> list[str]:
    return referenced_keys(Page((), replace(chunk, runs=chunk.runs[which]))) if which.any() else []


def memory_pages(state: CatalogState) -> list[Page]:
    """The runs in memory, not sorted."""
    return [Page(state.directory.keys[: len(state.table)], joined(state.chunks))] if state.chunks else []
