"""Reads the catalog: its head, any version, and newer commits. Needs no local state.

Costs one LIST of one key, the head commit, one root page, and the commits after it (at most those between two roots),
read in parallel. A root page only saves requests. A damaged or missing one is replaced by an earlier one and more
commits, in the end by the whole chain (docs/decisions/0036).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tiered.catalog.apply import apply
from tiered.catalog.commit import Commit, CommitInvalidError, CommitKind, decode_commit, decode_root
from tiered.catalog.holdings import REPAIR_HINT, Standing, without_commits
from tiered.catalog.page_bytes import read_page_bytes
from tiered.catalog.state import NO_ROOT, CatalogState, LogCheck, LogHistory, RootRef
from tiered.errors import (
    ArchiveDamagedError,
    CatalogLostError,
    CorruptionError,
    NoArchiveError,
    NotFoundError,
    TieredError,
    UnsupportedFormatError,
)
from tiered.formats.keys import CATALOG_PREFIX, catalog_key, parse_catalog_key
from tiered.formats.memory_bound import stored_bytes_max
from tiered.object_store.interface import ObjectStore

logger = logging.getLogger(__name__)

READ_THREADS = 8
PROBES_BEFORE_LIST = 8
REPLAY_MAX = 256
"""A reader further behind than this loads a root page."""


def head_version(store: ObjectStore) -> int:
    """The newest version, or 0 for an empty archive. Skips other objects: bucket browsers and file system gateways
    leave one named like a folder before all others."""
    after = ""
    for limit in (1, None):
        for info in store.list(CATALOG_PREFIX, start_after=after, limit=limit):
            version = parse_catalog_key(info.key)
            if version is not None:
                return version
            after = info.key
        if not after:
            return 0
    return 0


def read_commit(store: ObjectStore, version: int) -> Commit:
    """One commit; raises NotFoundError, CorruptionError, or what the store raises."""
    return _decoded(store, version, _commit_bytes(store, version))


def _commit_bytes(store: ObjectStore, version: int) -> bytes:
    return store.get(catalog_key(version), stored_bytes_max())


def _decoded(store: ObjectStore, version: int, data: bytes) -> Commit:
    key = catalog_key(version)
    commit = decode_commit(data, source=f"{store.url}/{key}")
    if commit.version != version:
        raise CorruptionError(f"{store.url}/{key} holds version {commit.version}, not {version}")
    return commit


def load(
    store: ObjectStore, *, version: int | None = None, known: CatalogState | None = None
) -> CatalogState:
    """The state at the head, or at ``version``. ``store`` is below the archive's prefix. ``known``: an earlier state
    to continue from if no newer root is readable.

    Raises NoArchiveError when nothing is there, CatalogLostError when objects are there without any commit,
    ArchiveDamagedError when the chain is broken, and UnsupportedFormatError.
    """
    wanted = head_version(store) if version is None else version
    if wanted == 0:
        raise without_commits(store)
    try:
        return _loaded(store, wanted, known or CatalogState())
    except NotFoundError as error:
        if version is None or version <= (newest := head_version(store)):
            raise
        raise NotFoundError(f"{store.url} has no version {version}: its newest is {newest}") from error
    except CorruptionError as error:
        raise ArchiveDamagedError(error.message, hint=REPAIR_HINT) from error


def _loaded(store: ObjectStore, wanted: int, known: CatalogState) -> CatalogState:
    """The state at a version, from the nearest root page that can be read; ``unread_root`` says which could not."""
    commit = read_commit(store, wanted)
    state, unread = _start(store, commit.root, commit.place.kept_root, known)
    if unread is None:
        return replay(store, state, wanted)
    try:
        return replace(replay(store, state, wanted), unread_root=commit.root)
    except CorruptionError as error:
        raise CorruptionError(f"{unread.message}; recovery without it failed: {error.message}") from error


def standing(store: ObjectStore) -> tuple[Standing, TieredError | None]:
    """What lies below the prefix of ``store``, and the error of loading it. Raises the store's errors."""
    try:
        load(store)
    except (ArchiveDamagedError, NoArchiveError, UnsupportedFormatError) as error:
        return next(found for found, kind in _ERRORS.items() if isinstance(error, kind)), error
    return Standing.WHOLE, None


_ERRORS: Mapping[Standing, type[TieredError]] = {
    Standing.UNEXPLAINED: CatalogLostError,
    Standing.DAMAGED: ArchiveDamagedError,
    Standing.FOREIGN: UnsupportedFormatError,
    Standing.EMPTY: NoArchiveError,
}


def refresh(store: ObjectStore, state: CatalogState) -> CatalogState:
    """``state`` advanced to the head by probing for the next versions; the same object if unchanged."""
    for _ in range(PROBES_BEFORE_LIST):
        try:
            commit = read_commit(store, state.version + 1)
        except NotFoundError:
            return state
        state = follow(store, state, commit)
    head = head_version(store)
    if head - state.version > REPLAY_MAX:
        return load(store, version=head, known=state)
    return replay(store, state, head)


def replay(store: ObjectStore, state: CatalogState, version: int) -> CatalogState:
    """``state`` advanced to ``version``, which must exist: commits are never removed, so a missing one is a
    CorruptionError."""
    versions = range(state.version + 1, version + 1)
    try:
        for commit in _commits(store, versions):
            state = follow(store, state, commit)
    except NotFoundError as error:
        key = catalog_key(state.version + 1)
        raise CorruptionError(
            f"the chain of commits to version {version} is broken: {store.url}/{key} of version {state.version + 1} is "
            "missing"
        ) from error
    return state


def follow(store: ObjectStore, state: CatalogState, commit: Commit) -> CatalogState:
    """``state`` after ``commit``; a commit that does not follow is a CorruptionError."""
    has_state = commit.draft.kind in (CommitKind.LOG_HISTORY, CommitKind.REPAIR)
    history_state = _history_state(store, commit) if has_state else None
    try:
        return apply(state, commit, history_state)
    except CommitInvalidError as error:
        raise CorruptionError(f"{store.url}/{catalog_key(commit.version)}: {error}") from error


def history_spans(state: CatalogState) -> list[tuple[int, int]]:
    """Versions (first, last), newest first, on the current log history; the versions between were abandoned."""
    first_kept = max(1, state.repaired_version)
    spans = spans_to(state.log_histories, state.version)
    return [(max(first, first_kept), last) for first, last in spans if last >= first_kept]


def shared_version(histories: Sequence[LogHistory], version: int, other: int) -> int:
    """The newest version that led to both; 0: none."""
    overlaps = [
        min(last, its_last)
        for first, last in spans_to(histories, version)
        for its_first, its_last in spans_to(histories, other)
        if max(first, its_first) <= min(last, its_last)
    ]
    return max(overlaps, default=0)


def spans_to(histories: Sequence[LogHistory], version: int) -> list[tuple[int, int]]:
    """Versions (first, last), newest first, that led to ``version``."""
    spans, last = list[tuple[int, int]](), version
    for history in histories_to(histories, version):
        spans.append((history.version + 1, last))
        last = history.common_version
    spans.append((1, last))
    return [(first, last) for first, last in spans if first <= last]


def histories_to(histories: Sequence[LogHistory], version: int) -> Iterator[LogHistory]:
    """The histories whose begins led to ``version``, newest first: others began later, or were abandoned."""
    last = version
    for history in reversed(histories):
        if history.version <= last:
            yield history
            last = history.common_version


def newest_log_check(store: ObjectStore, first: int, last: int) -> tuple[int, LogCheck, int] | None:
    """(version, check, physical end) of the newest commit in [first, last] that moved the cursor, or None. One GET for
    each commit read."""
    for version in range(last, first - 1, -1):
        draft = read_commit(store, version).draft
        if draft.kind == CommitKind.APPEND and draft.to_phys > draft.from_phys:
            return version, draft.check, draft.to_phys
    return None


def read_root(store: ObjectStore, root: RootRef) -> CatalogState:
    """The state in a root page; raises NotFoundError, CorruptionError, or what the store raises."""
    source = f"{store.url}/{root.key}"
    state = decode_root(read_page_bytes(store, root.key), source=source)
    if state.version != root.version:
        raise CorruptionError(f"{source} is the root of version {state.version}, not {root.version}")
    return state


def _start(
    store: ObjectStore, root: RootRef, kept: RootRef, known: CatalogState
) -> tuple[CatalogState, TieredError | None]:
    """The state of ``root``, else of the root ``kept`` when roots were replaced, else of the newest readable one before
    it, else ``known``; and the error of ``root``."""
    unread: TieredError | None = None
    while root.key and root.version > known.version:
        try:
            state = read_root(store, root)
        except (NotFoundError, CorruptionError) as error:
            # Old roots are collected as garbage: a missing one is not worth a warning.
            if isinstance(error, CorruptionError):
                logger.warning("root page unreadable, reading more commits instead: %s", error)
            is_collected = isinstance(error, NotFoundError) and kept.version < root.version and bool(kept.key)
            unread = unread or error
            root, kept = (kept, NO_ROOT) if is_collected else (_root_before(store, root, unread), kept)
            continue
        if not state.put_id:
            state = replace(state, put_id=_commit_of(store, root, unread).put_id)
        return state, unread
    return known, unread


def _root_before(store: ObjectStore, root: RootRef, unread: TieredError) -> RootRef:
    """The root before ``root``: of a lower version, or the one that started a log history at this version."""
    commit = _commit_of(store, root, unread)
    before = commit.place.root if commit.root == root else commit.root
    begins = (CommitKind.LOG_HISTORY, CommitKind.REPAIR)
    began_history = commit.draft.kind in begins and before == commit.draft.pages.root
    if before.version > root.version - (not began_history):
        raise CorruptionError(
            f"{unread.message}; recovery without it failed: version {root.version} names the root of version "
            f"{before.version}"
        )
    return before


def _commit_of(store: ObjectStore, root: RootRef, unread: TieredError | None) -> Commit:
    """The commit of a root's version. ``unread``: the error of an unreadable root, if that is the reason."""
    try:
        return read_commit(store, root.version)
    except (NotFoundError, CorruptionError) as error:
        before = f"{unread.message}; recovery without it failed: " if unread else ""
        raise CorruptionError(
            f"{before}the chain of commits to version {root.version} is broken: {error.message}"
        ) from error


def _history_state(store: ObjectStore, begin: Commit) -> CatalogState:
    """The first state of a log history. No commit contains it, but the next one has a second copy."""
    try:
        return read_root(store, begin.draft.pages.root)
    except (NotFoundError, CorruptionError) as error:
        try:
            copy = read_commit(store, begin.version + 1).draft.pages.root
        except NotFoundError:
            raise error from None
        if copy.version != begin.version:
            raise
        logger.warning("first root page of a log history unreadable, reading its second copy: %s", error)
        return read_root(store, copy)


def _commits(store: ObjectStore, versions: Sequence[int]) -> Iterator[Commit]:
    """The commits of these versions in order; many are fetched side by side."""
    if len(versions) < READ_THREADS // 2:
        yield from (read_commit(store, version) for version in versions)
        return
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="catalog") as pool:
        for first in range(0, len(versions), REPLAY_MAX):
            batch = versions[first : first + REPLAY_MAX]
            stored = pool.map(lambda version: _commit_bytes(store, version), batch)
            # One at a time: with many queues a decoded commit is a hundred times as large as it is stored.
            yield from (_decoded(store, version, data) for version, data in zip(batch, stored, strict=True))
