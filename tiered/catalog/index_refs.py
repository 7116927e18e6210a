"""Index files as the catalog knows them: which exist, and what each covers. Pure.

An index file covers whole catalog versions: every key of every run that versions [from, to] added. The files stand in
order and cover versions without a hole; whatever is newer is not indexed yet, and a query reads its key sections. So
one number, ``indexed_version``, says what a query must scan, and a delta that became void is seen at once. Segments
that could not be read when their versions were indexed are named apart: a query scans them as if they were newer, so
what is damaged never looks as if it held nothing.

Owns these values and what a change must obey. Does not own the files (tiered.index) nor when they are made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from tiered.catalog.json_fields import fields, items, text, whole
from tiered.errors import CorruptionError
from tiered.formats.keys import epoch_of

UNINDEXED = "index_left_out"
"""Name of the archive-wide setting: key of a data object → versions that index files cover without it."""
UNINDEXED_MAX = 1000
"""Objects in it, at most: it is part of every root page."""


class IndexRef(NamedTuple):
    """One index file over messages stored in [begin_ms, end_ms], records in [begin_phys, end_phys).

    ``items``, ``slot_bits`` and ``widths`` (bytes of an item's columns) give all positions in it; ``tail_bytes`` last
    bytes hold its footer. ``objects`` counts the data objects covered, ``level`` how often it was merged.
    """

    key: str
    level: int
    from_version: int
    to_version: int
    begin_ms: int
    end_ms: int
    begin_phys: int
    end_phys: int
    items: int
    slot_bits: int
    widths: tuple[int, int, int, int]
    objects: int
    size_bytes: int
    tail_bytes: int


@dataclass(frozen=True)
class IndexChange:
    """What a maintenance commit does: ``removed`` keys leave and become garbage, ``added`` files take their place or
    extend the coverage."""

    added: Sequence[IndexRef] = ()
    removed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


NO_INDEX_CHANGE = IndexChange()


def indexed_version(indexes: Sequence[IndexRef]) -> int:
    """Runs added up to this version are covered."""
    return indexes[-1].to_version if indexes else 0


def unindexed(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Data objects whose keys are in no index file, and the versions of theirs that files cover. Raises
    CorruptionError."""
    try:
        found = fields(settings.get(UNINDEXED, {}))
        return {key: tuple(map(whole, items(versions))) for key, versions in found.items()}
    except (TypeError, ValueError) as error:
        raise CorruptionError(f"the setting {UNINDEXED} does not parse: {error!r}") from error


def with_unindexed(
    before: Mapping[str, Sequence[int]],
    objects: Mapping[str, Iterable[int]],
    gone: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> dict[str, dict[str, list[int]]]:
    """Settings of a commit that leaves out ``objects``, with their versions, too, and forgets the versions that are
    ``gone``; empty when that changes nothing."""
    kept = {key: [v for v in versions if v not in gone.get(key, ())] for key, versions in before.items()}
    kept |= {key: sorted({*kept.get(key, ()), *versions}) for key, versions in objects.items()}
    after = {key: versions for key, versions in kept.items() if versions}
    is_same = after == {key: list(versions) for key, versions in before.items()}
    return {} if is_same else {UNINDEXED: after}


def after_change(
    indexes: Sequence[IndexRef],
    change: IndexChange,
    *,
    epoch: int,
    version: int,
    pending_deletions: Iterable[str],
) -> tuple[IndexRef, ...]:
    """The files after ``change``, which a commit of ``epoch`` makes as ``version``.

    Raises ValueError when a removed file is not there, an added one was given up before or is not of this epoch (its
    attempt is fenced, and may be collected), the versions are not covered exactly once, or coverage shrinks at its end.
    The oldest files may leave without a replacement.
    """
    gone = set(change.removed)
    if len(gone) != len(change.removed) or not gone <= {ref.key for ref in indexes}:
        raise ValueError("an index file to be removed is not there any more")
    garbage = set(pending_deletions)
    for ref in change.added:
        if epoch_of(ref.key) != epoch:
            raise ValueError(f"{ref.key} is not of epoch {epoch}: its attempt is fenced")
        if ref.key in garbage:
            raise ValueError(f"{ref.key} was given up before")
        if not 0 < ref.from_version <= ref.to_version < version:
            raise ValueError(
                f"{ref.key} covers versions [{ref.from_version}, {ref.to_version}] before {version}"
            )
    found = [*(ref for ref in indexes if ref.key not in gone), *change.added]
    found.sort(key=lambda ref: ref.from_version)
    if len({ref.key for ref in found}) != len(found):
        raise ValueError("an index file is named twice")
    for before, after in pairwise(found):
        if after.from_version != before.to_version + 1:
            raise ValueError(f"versions between {before.key} and {after.key} are not covered exactly once")
    if indexed_version(found) < indexed_version(indexes):
        raise ValueError("versions that were indexed would not be any more")
    if found and found[0].from_version > (indexes[0].from_version if indexes else 1):
        expired = [ref for ref in indexes if ref.to_version < found[0].from_version]
        if not expired or expired[-1].to_version + 1 != found[0].from_version:
            raise ValueError(f"versions before {found[0].from_version} are not covered")
    return tuple(found)


def index_ref(item: Any) -> IndexRef:
    """An IndexRef from JSON. Raises TypeError or ValueError."""
    ref = IndexRef(*items(item))
    queue_offset, store_timestamp, queue_id, generation = map(whole, items(ref.widths))
    numbers = {name: whole(value) for name, value in ref._asdict().items() if name not in ("key", "widths")}
    return IndexRef(
        key=text(ref.key), widths=(queue_offset, store_timestamp, queue_id, generation), **numbers
    )
