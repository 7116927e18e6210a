"""What is left of a catalog: the newest state that can be read, with every later commit that can be applied.

head readable      the state as readers load it
else               the newest readable root and the commits after it; where one is damaged or missing, later ones
                   are applied all the same: what lies between is missing in the queues that they continue
nothing readable   an empty state: everything comes from data objects
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tiered.archive.verify import listed_versions
from tiered.catalog.apply import apply
from tiered.catalog.catalog_reader import follow, head_version, load, read_commit
from tiered.catalog.commit import Commit, CommitDraft, CommitInvalidError, CommitKind, decode_root
from tiered.catalog.holdings import OBJECT_PREFIXES
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.state import CatalogState, LogCursor, Owner
from tiered.errors import CorruptionError, NoArchiveError, NotFoundError, UsageError
from tiered.formats.keys import PAGES_PREFIX, VERSION_END, catalog_key, epoch_of, page_version
from tiered.model.tables import GAP_DTYPE, GapReason, RunKind
from tiered.object_store.interface import ObjectStore

DAMAGE = (CorruptionError, NotFoundError)
ROOT_KINDS = ("root-", "history-", "repair-")
VERSION_STEP = 100_000
"""Above the highest version that anything names, where newer ones are lost: a paused writer may know of them."""


@dataclass
class Survey:
    """``state``: the best that the catalog gives. ``is_whole``: up to its newest commit. ``notes``: what is damaged.
    ``version`` and ``epoch``: above every one that anything names."""

    state: CatalogState = field(default_factory=CatalogState)
    is_whole: bool = True
    is_chain_whole: bool = True
    notes: list[str] = field(default_factory=list)
    version: int = 1
    epoch: int = 1
    begun: LogCursor = field(default_factory=lambda: CatalogState().cursor)
    appends: list[CommitDraft] = field(default_factory=list)
    """What of the log was archived is known up to ``begun``, and of the ranges of ``appends``, later commits."""
    unreadable: set[str] = field(default_factory=set)
    """Roots that may have facts which nothing else has."""


def survey(store: ObjectStore) -> Survey:
    """Read what is left of the catalog: the newest state that can be loaded, else the newest readable root page (whole
    state at one version) with the commits after it. Raises NoArchiveError if nothing is there at all,
    UnsupportedFormatError for a format that this program does not read, and the store's errors, except for single
    objects."""
    result = Survey()
    head = head_version(store)
    versions = listed_versions(store, 1, head)
    try:
        result.state = load(store, version=head)
        result.begun = result.state.cursor
    except NoArchiveError:
        raise
    except DAMAGE as error:
        result.is_whole = False
        result.notes.append(f"catalog version {head}, the newest, cannot be loaded: {error.message}")
        result.state = _newest_root(store, result)
        result.begun = result.state.cursor
        _apply_later(store, [one for one in versions if one > result.state.version], result)
    _check_commits(store, [one for one in versions if one >= result.state.repaired_version], result)
    _number(store, head, result)
    return result


def _newest_root(store: ObjectStore, found: Survey) -> CatalogState:
    """The catalog's state by the newest root page that can be read; an empty state if there is none. Newer ones, which
    cannot be read, are noted in ``found``."""
    kinds = tuple(f"{PAGES_PREFIX}{kind}" for kind in ROOT_KINDS)
    keys = [info.key for info in store.list(PAGES_PREFIX) if info.key.startswith(kinds)]
    for key in sorted(keys, key=lambda key: page_version(key) or 0, reverse=True):
        try:
            return decode_root(read_page_bytes(store, key), source=key)
        except DAMAGE as error:
            found.notes.append(f"catalog root page {key} cannot be read: {error.message}")
            found.unreadable.add(key)
    return CatalogState()


def _apply_later(store: ObjectStore, versions: list[int], found: Survey) -> None:
    """Apply the commits of ``versions``, above the root page that was read, to the state of ``found``. One that cannot
    be read is noted and skipped; one that does not follow what is left is applied all the same if that is possible."""
    for version in versions:
        state = found.state
        try:
            commit = read_commit(store, version)
        except DAMAGE as error:
            found.notes.append(f"catalog commit {version} cannot be read: {error.message}")
            continue
        if commit.draft.kind == CommitKind.APPEND:
            found.appends.append(commit.draft)
        try:
            if version == state.version + 1 and state.put_id in ("", commit.place.predecessor_put_id):
                found.state = follow(store, replace(state, put_id=commit.place.predecessor_put_id), commit)
            else:
                found.state = apply(_bridged(state, commit), commit)
        except (CommitInvalidError, *DAMAGE) as error:
            found.is_chain_whole = False
            found.notes.append(
                f"catalog commit {version} does not follow what is left of the commits before it: {error.message}"
            )


def _bridged(state: CatalogState, commit: Commit) -> CatalogState:
    """``state`` changed so that ``commit`` can follow it, although commits between them cannot be read: version, epoch,
    writer and place in the log are those that ``commit`` continues, and queues to which the unreadable commits added
    rows have a gap."""
    place, draft = commit.place, commit.draft
    owner = state.owner
    if owner is None or owner.released or owner.instance != place.actor:
        owner = Owner(place.actor, "run", "", 0, False)
    cursor = state.cursor
    if draft.kind == CommitKind.APPEND:
        cursor = LogCursor(draft.history, draft.from_phys, draft.check)
    table, gaps = state.table.copy(), [state.gaps]
    rows = [state.row_of(queue) for queue in draft.queues] if draft.kind == CommitKind.APPEND else []
    for number, row in enumerate(rows):
        runs = draft.runs[draft.runs["queue"] == number]
        begins = [
            *runs["base_queue_offset"],
            *draft.gaps["begin_queue_offset"][draft.gaps["queue"] == number],
        ]
        if row is None or not begins:
            continue
        end, begin = int(table["end_queue_offset"][row]), int(min(begins))
        if begin > end:
            gaps.append(np.array([(row, GapReason.LOST, end, begin)], GAP_DTYPE))
            table["end_queue_offset"][row] = begin
        base_bytes = runs["base_byte"][runs["kind"] != RunKind.LMQ]
        if len(base_bytes):
            table["end_byte"][row] = base_bytes.min()
    return replace(
        state,
        version=place.version - 1,
        epoch=place.epoch - (draft.kind == CommitKind.CLAIM),
        owner=owner,
        put_id=place.predecessor_put_id,
        cluster=place.cluster,
        broker=place.broker,
        cursor=cursor,
        root=place.root,
        table=table,
        gaps=np.concatenate(gaps),
    )


def _check_commits(store: ObjectStore, versions: list[int], found: Survey) -> None:
    """Check that the commits of ``versions`` follow one another without a hole: each can be read and names the one
    before it. What does not hold is noted in ``found``."""
    expected, put_id = max(1, found.state.repaired_version), ""
    for version in versions:
        try:
            commit = read_commit(store, version)
        except DAMAGE as error:
            found.is_chain_whole, put_id = False, ""
            note = f"catalog commit {version} cannot be read: {error.message}"
            found.notes += [note] if note not in found.notes else []
        else:
            predecessor = commit.place.predecessor_put_id
            is_next = version == expected and put_id in ("", predecessor)
            if not is_next:
                found.is_chain_whole = False
                found.notes.append(
                    f"catalog commit {version} does not name the commit before it as its predecessor"
                )
            put_id = commit.put_id
        expected = version + 1
    if expected <= found.state.version:
        found.is_chain_whole = False
        found.notes.append(f"catalog commits from version {expected} on are missing")


def _number(store: ObjectStore, head: int, found: Survey) -> None:
    """Choose version and epoch of the repair's commit, above all that any key in the store names: a process that still
    runs cannot commit there. If pages of the catalog name versions above the newest commit ``head``, commits are lost,
    and the version is VERSION_STEP higher, as writers may know of still later ones."""
    version, epoch = max(head, found.state.version), found.state.epoch
    for key in _keys(store):
        version = max(version, page_version(key) or 0)
        epoch = max(epoch, epoch_of(key) or 0)
    found.version = version + 1 if version == head else version + VERSION_STEP
    found.is_chain_whole = found.is_chain_whole and 0 < version == head
    found.epoch = epoch + 1
    if found.version >= VERSION_END:
        raise UsageError(
            f"an object in {store.url} has catalog version {version} in its name, which is too large for an archive",
            hint=f"move the object whose name has version {version} ({catalog_key(head)}, or an object below "
            f"{PAGES_PREFIX}) out of the archive, then run tiered repair again",
        )


def _keys(store: ObjectStore) -> Iterator[str]:
    for prefix in OBJECT_PREFIXES:
        for info in store.list(prefix):
            yield info.key
