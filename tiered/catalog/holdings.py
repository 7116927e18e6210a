"""What lies below an archive's prefix without any commit: asked before anything begins, repairs or deletes.

    empty           nothing of an archive: only here one may begin
    whole           the newest state can be loaded
    damaged         there are commits, but the newest state cannot be loaded
    unexplained     there are objects, but no commit: the catalog is lost
    foreign format  this program does not read the format, so it changes nothing

``catalog_reader.standing`` gives one of these answers. A whole archive is never listed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from tiered.console import counted, time_text
from tiered.errors import CatalogLostError, CorruptionError, NoArchiveError, NotFoundError, TieredError
from tiered.formats.container import HEADER, check_header
from tiered.formats.keys import (
    DATA_PREFIX,
    INDEX_PREFIX,
    PAGES_PREFIX,
    SERVE_PREFIX,
    SETS_PREFIX,
    STATE_PREFIX,
    TIMER_PREFIX,
    archive_prefix,
    epoch_of,
)
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import TRAILER_BYTES, decode_trailer
from tiered.formats.version import FORMAT_MAJOR
from tiered.object_store.interface import ObjectInfo, ObjectStore

OBJECT_PREFIXES = (DATA_PREFIX, SETS_PREFIX, PAGES_PREFIX, INDEX_PREFIX, STATE_PREFIX, TIMER_PREFIX)
"""Where an archive has objects, besides its commits."""
LISTED_MAX = 1_000
"""Objects of each prefix are counted up to this number, by one LIST. The format of three of them is read."""
REPAIR_HINT = "stop its writer, then run tiered repair ARCHIVE_URL: a dry run that says what it restores"


class Standing(StrEnum):
    """What lies below an archive's prefix."""

    EMPTY = "empty"
    WHOLE = "whole"
    DAMAGED = "damaged"
    UNEXPLAINED = "unexplained"
    FOREIGN = "foreign format"


@dataclass(frozen=True)
class Holdings:
    """How many objects there are by prefix, counted up to LISTED_MAX; the highest epoch in their names, the time of the
    newest, and the archives (cluster, broker) that samples of them belong to."""

    counts: Mapping[str, int]
    epoch: int
    newest_ms: int
    owners: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{prefix} {count:,}{'+' if count == LISTED_MAX else ''}" for prefix, count in self.counts.items()
        )
        return f"{kinds}; format {FORMAT_MAJOR}.x, epochs up to {self.epoch}, newest of {time_text(self.newest_ms)}"


def objects_below(store: ObjectStore) -> Iterator[tuple[str, ObjectInfo]]:
    """All objects of an archive with their prefix: neither commits, nor what servers keep for clients, nor the empty
    objects that bucket browsers and file system gateways leave in the place of folders."""
    for prefix in OBJECT_PREFIXES:
        for info in store.list(prefix):
            if info.size_bytes and not info.key.startswith(SERVE_PREFIX):
                yield prefix, info


def holdings(store: ObjectStore) -> Holdings:
    """Which objects, other than commits, lie below the prefix of ``store``: one LIST for each kind of object, and GETs
    of three samples of it. Raises UnsupportedFormatError if a sample has another format, and the store's errors."""
    counts, epoch, newest_ms, owners = dict[str, int](), 0, 0, set[tuple[str, str]]()
    for prefix in OBJECT_PREFIXES:
        # Empty objects do not count: bucket browsers leave them in the place of folders.
        listed = (info for info in store.list(prefix, limit=LISTED_MAX) if info.size_bytes)
        objects = [info for info in islice(listed, LISTED_MAX) if not info.key.startswith(SERVE_PREFIX)]
        if not objects:
            continue
        counts[prefix] = len(objects)
        epoch = max(epoch, *(epoch_of(info.key) or 0 for info in objects))
        newest_ms = max(newest_ms, *(info.modified_ms for info in objects))
        for info in {objects[0], objects[len(objects) // 2], objects[-1]}:
            owners |= _owner_of(store, prefix, info)
    return Holdings(counts, epoch, newest_ms, tuple(sorted(owners)))


def _owner_of(store: ObjectStore, prefix: str, info: ObjectInfo) -> set[tuple[str, str]]:
    """The (cluster, broker) of the archive that an object names as its own; empty if it names none or is damaged.
    Raises UnsupportedFormatError, and the store's errors."""
    key, size = info.key, info.size_bytes
    try:
        if prefix not in (DATA_PREFIX, SETS_PREFIX):
            # Other kinds name no archive; those with a header show whether their format is known.
            if prefix in (PAGES_PREFIX, STATE_PREFIX):
                check_header(store.get_range(key, 0, min(size, HEADER.size)), f"{store.url}/{key}")
            return set()
        trailer = store.get_range(key, max(0, size - TRAILER_BYTES), min(size, TRAILER_BYTES))
        length = size - decode_trailer(trailer, size, source=f"{store.url}/{key}").tail_offset
        meta = SegmentIndex(key, size, store.get_range(key, size - length, length)).meta
    except (CorruptionError, NotFoundError):
        return set()
    return {(meta.cluster, meta.broker)}


def without_commits(store: ObjectStore) -> TieredError:
    """The error for an archive that has no commit: that there is none, or, if other objects are there, that its
    catalog is lost. Raises what ``holdings`` raises."""
    present = holdings(store)
    if not present.counts:
        return NoArchiveError(f"{store.url} holds no archive")
    hint = REPAIR_HINT
    strangers = [names for names in present.owners if not store.url.endswith(f"/{archive_prefix(*names)}")]
    if strangers:
        # A repair would take objects that were copied here by mistake for its own.
        place = f"{archive_prefix(*strangers[0])}/"
        hint = f"some objects belong to the archive of {'/'.join(strangers[0])}: move those below {place} first; {hint}"
    count = counted(sum(present.counts.values()), "object")
    return CatalogLostError(
        f"the catalog is lost: {store.url} holds {count} and no commit that names them ({present})", hint=hint
    )
