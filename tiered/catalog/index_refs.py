"""Index files in the catalog: which exist, and what each covers. Pure.

An index file covers whole catalog versions: every key of every run that versions [from, to] added. The files are
ordered and cover versions without a hole; newer versions are unindexed, and a query reads their key sections. So one
number, ``indexed_version``, tells a query what to scan. Segments that were unreadable when their versions were indexed
are recorded as unindexed: a query scans them like newer ones, so damage never looks like absence.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from tiered.catalog.json_fields import fields, items, text, whole
from tiered.errors import CorruptionError
from tiered.formats.keys import epoch_of

UNINDEXED = "unindexed"
"""Archive-wide setting: key of an unindexed data object → versions that index files cover without it."""
UNINDEXED_MAX = 1000
"""Maximum number of unindexed objects: they are part of every root page."""


class IndexRef(NamedTuple):
    """One index file: of the runs that the catalog versions [from_version, to_version] added, whose messages were
    stored from ``begin_ms`` to ``end_ms``, and are in the commitlog at [begin_phys, end_phys).

    ``items``, ``slot_bits`` and ``widths`` (bytes of an item's columns) determine all positions in it; ``tail_bytes``
    is the size of its footer. ``objects``: how many data objects it covers; ``level``: how often it was merged.
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
    """What a maintenance commit changes in the index files: those with the keys ``removed`` become garbage, and
    ``added`` ones cover the same versions, or later ones."""

    added: Sequence[IndexRef] = ()
    removed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


NO_INDEX_CHANGE = IndexChange()


def indexed_version(indexes: Sequence[IndexRef]) -> int:
    """The version up to which index files cover all added runs; 0: there is no index file."""
    return indexes[-1].to_version if indexes else 0


def whole_until(
    indexes: Sequence[IndexRef], version: int, whole: Collection[IndexRef]
) -> tuple[IndexRef, ...]:
    """The first of ``indexes``, up to the first file that may lack messages which become visible again, of ``version``
    and later ones: a file that covers such a version and is not one of ``whole``, which have these messages."""
    return tuple(takewhile(lambda ref: ref.to_version < version or ref in whole, indexes))


def unindexed(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Data objects whose keys are in no index file although files cover their versions, with these versions.
    ``settings`` are those of the archive. Raises CorruptionError."""
    try:
        recorded = fields(settings.get(UNINDEXED, {}))
        return {key: tuple(map(whole, items(versions))) for key, versions in recorded.items()}
    except (TypeError, ValueError) as error:
        raise CorruptionError(
            f"the catalog is damaged: the archive's setting {UNINDEXED!r} is invalid: {error!r}"
        ) from error


def with_unindexed(
    before: Mapping[str, Sequence[int]],
    objects: Mapping[str, Iterable[int]],
    gone: Mapping[str, Collection[int]] = MappingProxyType({}),
) -> dict[str, dict[str, list[int]]]:
    """Settings of a commit that records ``objects``, with the versions that added their runs, as unindexed, in addition
    to ``before``. Versions in ``gone`` are no longer recorded. Empty if nothing changes."""
    kept = {
        key: [version for version in versions if version not in gone.get(key, ())]
        for key, versions in before.items()
    }
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
    """The index files of a state, which has ``indexes``, after a commit of ``epoch`` and ``version`` with ``change``.

    Raises ValueError when a removed file does not exist, an added one is a pending deletion or not of this epoch (its
    attempt is fenced, and may be collected), the versions are not covered exactly once, or coverage shrinks at its
    end. The oldest files may be removed without a replacement.
    """
    removed = set(change.removed)
    unknown = removed - {ref.key for ref in indexes}
    if unknown or len(removed) != len(change.removed):
        raise ValueError(
            f"it removes index files twice, or that the catalog does not have: {sorted(unknown or removed)[0]}"
        )
    garbage = set(pending_deletions)
    for ref in change.added:
        if epoch_of(ref.key) != epoch:
            raise ValueError(
                f"the index file {ref.key} was not written in epoch {epoch}: its writer has lost the archive"
            )
        if ref.key in garbage:
            raise ValueError(f"the index file {ref.key}, which it adds, is a pending deletion")
        if not 0 < ref.from_version <= ref.to_version < version:
            raise ValueError(
                f"the index file {ref.key} covers catalog versions {ref.from_version} to {ref.to_version}, though it "
                f"may cover only those before {version}"
            )
    files = [*(ref for ref in indexes if ref.key not in removed), *change.added]
    files.sort(key=lambda ref: ref.from_version)
    if len({ref.key for ref in files}) != len(files):
        raise ValueError("it adds an index file that the catalog already has")
    for before, after in pairwise(files):
        if after.from_version != before.to_version + 1:
            raise ValueError(
                f"the catalog versions between the index files {before.key} and {after.key} are not covered exactly "
                "once"
            )
    if indexed_version(files) < indexed_version(indexes):
        raise ValueError("it removes the newest index files without one that covers their versions")
    if files and files[0].from_version > (indexes[0].from_version if indexes else 1):
        # The oldest files may leave, but only as a whole: the first that stays was behind one that expired.
        expired = [ref for ref in indexes if ref.to_version < files[0].from_version]
        if not expired or expired[-1].to_version + 1 != files[0].from_version:
            raise ValueError(f"no index file covers all versions before {files[0].from_version}")
    return tuple(files)


def index_ref(item: Any) -> IndexRef:
    """The entry of an index file from a JSON list of its fields. Raises TypeError or ValueError."""
    untyped = IndexRef(*items(item))
    queue_offset, store_timestamp, queue_id, generation = map(whole, items(untyped.widths))
    numbers = {
        name: whole(value) for name, value in untyped._asdict().items() if name not in ("key", "widths")
    }
    return IndexRef(
        key=text(untyped.key), widths=(queue_offset, store_timestamp, queue_id, generation), **numbers
    )
