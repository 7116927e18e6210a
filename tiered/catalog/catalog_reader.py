"""Reads the catalog: its head, any version, and newer commits. Needs no local state.

Costs one LIST of one key, the head commit, one root page, and the commits after it (at most those between two roots),
read in parallel. A root page only saves requests. A damaged or missing one is replaced by an earlier one and more
commits, in the end by the whole chain (docs/decisions/0036).
"""

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
    """The newest version of the catalog of the archive in ``store``; 0: it has no commit. Takes one LIST of one key,
    as newer versions have smaller keys, unless other objects are there."""
    after = ""
    # Bucket browsers and file system gateways leave an object named like the folder, before all others.
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
    """Read the commit of ``version``. Raises NotFoundError, CorruptionError, or what the store raises."""
    return _decoded(store, version, _commit_bytes(store, version))


def _commit_bytes(store: ObjectStore, version: int) -> bytes:
    return store.get(catalog_key(version), stored_bytes_max())


def _decoded(store: ObjectStore, version: int, data: bytes) -> Commit:
    key = catalog_key(version)
    commit = decode_commit(data, source=f"{store.url}/{key}")
    if commit.version != version:
        raise CorruptionError(f"{store.url}/{key} holds catalog version {commit.version}, not {version}")
    return commit


def load(
    store: ObjectStore, *, version: int | None = None, known: CatalogState | None = None
) -> CatalogState:
    """The state of the catalog at its newest version, or at ``version``. ``store`` is below the archive's prefix.
    ``known``: an earlier state to continue from if no newer root page (a copy of the whole state) is readable.

    Raises NoArchiveError if nothing is there, CatalogLostError if objects are there without any commit, NotFoundError
    if the archive has no such version, ArchiveDamagedError if the chain of commits is broken, and
    UnsupportedFormatError.
    """
    wanted = head_version(store) if version is None else version
    if wanted == 0:
        raise without_commits(store)
    try:
        return _loaded(store, wanted, known or CatalogState())
    except NotFoundError as error:
        if version is None or version <= (newest := head_version(store)):
            raise
        raise NotFoundError(
            f"{store.url} has no catalog version {version}: its newest is version {newest}"
        ) from error
    except CorruptionError as error:
        raise ArchiveDamagedError(error.message, hint=REPAIR_HINT) from error


def _loaded(store: ObjectStore, version: int, known: CatalogState) -> CatalogState:
    """The state at ``version``: the nearest root page (a copy of the whole state) that can be read, and the commits
    after it. If the newest root page cannot be read, ``unread_root`` of the state names it."""
    commit = read_commit(store, version)
    state, root_error = _start(store, commit.root, commit.place.kept_root, known)
    if root_error is None:
        return replay(store, state, version)
    try:
        return replace(replay(store, state, version), unread_root=commit.root)
    except CorruptionError as error:
        raise CorruptionError(
            f"{root_error.message}; to read commits from an earlier root page on failed too: {error.message}"
        ) from error


def standing(store: ObjectStore) -> tuple[Standing, TieredError | None]:
    """Whether the archive in ``store`` is empty, whole, damaged, unexplained (objects without commits) or of a foreign
    format, and the error of loading it; None if it is whole. Raises the store's errors."""
    try:
        load(store)
    except (ArchiveDamagedError, NoArchiveError, UnsupportedFormatError) as error:
        return next(kind for kind, class_ in _ERRORS.items() if isinstance(error, class_)), error
    return Standing.WHOLE, None


_ERRORS: Mapping[Standing, type[TieredError]] = {
    Standing.UNEXPLAINED: CatalogLostError,
    Standing.DAMAGED: ArchiveDamagedError,
    Standing.FOREIGN: UnsupportedFormatError,
    Standing.EMPTY: NoArchiveError,
}


def refresh(store: ObjectStore, state: CatalogState) -> CatalogState:
    """The newest state of the catalog, from an earlier ``state``; the same object if it is the newest. Reads the next
    versions one by one, and lists or loads the catalog only if there are many. Raises what ``load`` raises."""
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
    """The state at ``version``, which must exist, from the earlier ``state`` and the commits between them. Raises
    CorruptionError if one of these is damaged or missing, as commits are never removed."""
    versions = range(state.version + 1, version + 1)
    try:
        for commit in _commits(store, versions):
            state = follow(store, state, commit)
    except NotFoundError as error:
        key = catalog_key(state.version + 1)
        raise CorruptionError(
            f"the chain of commits to catalog version {version} is broken: version {state.version + 1}, "
            f"{store.url}/{key}, is missing"
        ) from error
    return state


def follow(store: ObjectStore, state: CatalogState, commit: Commit) -> CatalogState:
    """The state after ``commit``, which was read from ``store``. Raises CorruptionError if it does not follow
    ``state``, or the state that it names cannot be read."""
    # The begin of a log history and a repair carry no changes, but name a root page with the state after them.
    has_state = commit.draft.kind in (CommitKind.LOG_HISTORY, CommitKind.REPAIR)
    history_state = _history_state(store, commit) if has_state else None
    try:
        return apply(state, commit, history_state)
    except CommitInvalidError as error:
        raise CorruptionError(f"{store.url}/{catalog_key(commit.version)}: {error}") from error


def history_spans(state: CatalogState) -> list[tuple[int, int]]:
    """The catalog versions, as spans (first, last), newest first, whose commits led to ``state``. Those between two
    spans were abandoned when the broker's log was truncated or replaced."""
    first_kept = max(1, state.repaired_version)
    spans = spans_to(state.log_histories, state.version)
    return [(max(first, first_kept), last) for first, last in spans if last >= first_kept]


def shared_version(histories: Sequence[LogHistory], version: int, other: int) -> int:
    """The newest catalog version whose messages both ``version`` and the version ``other`` have, which may be of
    another log history; 0: there is none."""
    common_ends = [
        min(last, other_last)
        for first, last in spans_to(histories, version)
        for other_first, other_last in spans_to(histories, other)
        if max(first, other_first) <= min(last, other_last)
    ]
    return max(common_ends, default=0)


def spans_to(histories: Sequence[LogHistory], version: int) -> list[tuple[int, int]]:
    """The versions (first, last), newest first, whose messages ``version`` has: without those that it abandoned when
    the broker's log was replaced and an earlier version was continued."""
    spans, last = list[tuple[int, int]](), version
    for history in histories_to(histories, version):
        spans.append((history.version + 1, last))
        last = history.common_version
    spans.append((1, last))
    return [(first, last) for first, last in spans if first <= last]


def histories_to(histories: Sequence[LogHistory], version: int) -> Iterator[LogHistory]:
    """The log histories whose begins led to ``version``, newest first. Others began later, or were abandoned."""
    last = version
    for history in reversed(histories):
        if history.version <= last:
            yield history
            last = history.common_version


def newest_log_check(store: ObjectStore, first: int, last: int) -> tuple[int, LogCheck, int] | None:
    """The newest of the versions ``first`` to ``last`` that archived bytes of the log: its number, the checksum of the
    last of these bytes, and their end in the commitlog; None if there is none. Takes one GET for each commit read."""
    for version in range(last, first - 1, -1):
        draft = read_commit(store, version).draft
        if draft.kind == CommitKind.APPEND and draft.to_phys > draft.from_phys:
            return version, draft.check, draft.to_phys
    return None


def read_root(store: ObjectStore, root: RootRef) -> CatalogState:
    """The state in the root page ``root``. Raises NotFoundError, CorruptionError, or what the store raises."""
    source = f"{store.url}/{root.key}"
    state = decode_root(read_page_bytes(store, root.key), source=source)
    if state.version != root.version:
        raise CorruptionError(f"{source} is the root page of version {state.version}, not {root.version}")
    return state


def _start(
    store: ObjectStore, root: RootRef, kept: RootRef, known: CatalogState
) -> tuple[CatalogState, TieredError | None]:
    """The state from which a reader applies commits: that of the root page ``root``, or if that cannot be read, of
    ``kept`` (an older root page that stays when others are replaced), or of the newest readable one before it, or
    ``known``. Returns it with the error of reading ``root``, None if it was read."""
    root_error: TieredError | None = None
    while root.key and root.version > known.version:
        try:
            state = read_root(store, root)
        except (NotFoundError, CorruptionError) as error:
            # Old roots are collected as garbage: a missing one is not worth a warning.
            if isinstance(error, CorruptionError):
                logger.warning(
                    "a root page of the catalog cannot be read, and more commits are read instead: %s", error
                )
            is_collected = isinstance(error, NotFoundError) and kept.version < root.version and bool(kept.key)
            # Instead of ``kept``, a damaged root page is replaced by the one before it.
            root_error = root_error or error
            root, kept = (kept, NO_ROOT) if is_collected else (_root_before(store, root, root_error), kept)
            continue
        if not state.put_id:
            # The first state of a log history was encoded before its commit, which has the put id.
            state = replace(state, put_id=_commit_of(store, root, root_error).put_id)
        return state, root_error
    return known, root_error


def _root_before(store: ObjectStore, root: RootRef, root_error: TieredError) -> RootRef:
    """The newest root page before ``root``, which cannot be read because of ``root_error``. It is of a lower version;
    but a commit that starts a log history, or a repair, is carried by its root page alone, of which the next commit may
    name a copy: then the first of the two comes before the copy. Raises CorruptionError."""
    commit = _commit_of(store, root, root_error)
    # A commit names the root page before it, and may name a new one.
    before = commit.place.root if commit.root == root else commit.root
    begins = (CommitKind.LOG_HISTORY, CommitKind.REPAIR)
    began_history = commit.draft.kind in begins and before == commit.draft.pages.root
    newest_allowed = root.version if began_history else root.version - 1
    if before.version > newest_allowed:
        raise CorruptionError(
            f"{root_error.message}; to read commits from an earlier root page on failed too: catalog version "
            f"{root.version} names the root page of version {before.version} as an earlier one"
        )
    return before


def _commit_of(store: ObjectStore, root: RootRef, root_error: TieredError | None) -> Commit:
    """The commit of the version that the root page ``root`` is of. Raises CorruptionError, which also names
    ``root_error`` if the commit is read because that root page cannot be."""
    try:
        return read_commit(store, root.version)
    except (NotFoundError, CorruptionError) as error:
        before = (
            f"{root_error.message}; to read commits from an earlier root page on failed too: "
            if root_error
            else ""
        )
        raise CorruptionError(
            f"{before}the chain of commits to catalog version {root.version} is broken: {error.message}"
        ) from error


def _history_state(store: ObjectStore, begin: Commit) -> CatalogState:
    """The first state of the log history that the commit ``begin`` starts, from the root page that it names, or from
    the copy that the next commit names: no commit carries the changes. Raises NotFoundError or CorruptionError."""
    try:
        return read_root(store, begin.draft.pages.root)
    except (NotFoundError, CorruptionError) as error:
        try:
            copy = read_commit(store, begin.version + 1).draft.pages.root
        except NotFoundError:
            raise error from None
        if copy.version != begin.version:
            raise
        logger.warning(
            "the first root page of a log history cannot be read, and its copy is read instead: %s", error
        )
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
