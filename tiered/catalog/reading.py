"""Reading the catalog: its head, any version, and what came since. Reads only; needs no local state.

Starting costs one LIST of one key, the head commit, one root page, and the commits after it (at most as many as lie
between two roots), read side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tiered.catalog.apply import apply
from tiered.catalog.carried import read_commit_bytes, read_page_bytes
from tiered.catalog.commit import Commit, CommitInvalidError, CommitKind, decode_commit
from tiered.catalog.snapshot import decode_root
from tiered.catalog.state import CatalogState, LogCheck, RootRef
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.keys import CATALOG_PREFIX, catalog_key, parse_catalog_key
from tiered.object_store.protocol import ObjectStore

READ_THREADS = 8
PROBES_BEFORE_LIST = 8
REPLAY_MAX = 256
"""A reader further behind than this starts anew from a root."""


def head_version(store: ObjectStore) -> int:
    """The newest version, or 0 for an empty archive. Objects that are no commits are passed over: browsers of buckets
    and file systems over them leave one that is called like a folder, in front of all others."""
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
    key = catalog_key(version)
    commit = decode_commit(read_commit_bytes(store, key), source=f"{store.url}/{key}")
    if commit.version != version:
        raise CorruptionError(f"{store.url}/{key} holds version {commit.version}, not {version}")
    return commit


def load(store: ObjectStore, *, version: int | None = None) -> CatalogState:
    """The state at the head, or at ``version``. ``store`` is the archive's own prefix.

    Raises NotFoundError when there is no archive or no such version, CorruptionError when the chain is broken.
    """
    wanted = head_version(store) if version is None else version
    if wanted == 0:
        raise NotFoundError(f"{store.url} holds no archive")
    commit = read_commit(store, wanted)
    return replay(store, _start(store, commit), wanted)


def refresh(store: ObjectStore, state: CatalogState) -> CatalogState:
    """``state`` moved on to the head, by probing for the next versions; the same object when nothing came."""
    for _ in range(PROBES_BEFORE_LIST):
        try:
            commit = read_commit(store, state.version + 1)
        except NotFoundError:
            return state
        state = follow(store, state, commit)
    head = head_version(store)
    if head - state.version > REPLAY_MAX:
        return load(store, version=head)
    return replay(store, state, head)


def replay(store: ObjectStore, state: CatalogState, version: int) -> CatalogState:
    """``state`` moved on to ``version``, which must exist: commits are never removed, so one that is not there is a
    CorruptionError."""
    versions = range(state.version + 1, version + 1)
    try:
        for commit in _commits(store, versions):
            state = follow(store, state, commit)
    except NotFoundError as error:
        raise CorruptionError(
            f"the chain of commits to version {version} is broken: {error.message}"
        ) from error
    return state


def follow(store: ObjectStore, state: CatalogState, commit: Commit) -> CatalogState:
    """``state`` after ``commit`` as read back; a commit that does not follow is a CorruptionError."""
    line_state = _read_root(store, commit.draft.pages.root) if commit.draft.kind == CommitKind.LINE else None
    try:
        return apply(state, commit, line_state)
    except CommitInvalidError as error:
        raise CorruptionError(f"{store.url}/{catalog_key(commit.version)}: {error}") from error


def line_spans(state: CatalogState) -> list[tuple[int, int]]:
    """Versions (first, last), newest first, of the log that the archive is made from; what lies between was left."""
    spans = []
    last = state.version
    for line in reversed(state.lines):
        if line.version > last:
            continue  # itself left by a newer line
        spans.append((line.version + 1, last))
        last = line.common_version
    spans.append((1, last))
    return [(first, last) for first, last in spans if first <= last]


def newest_log_check(store: ObjectStore, first: int, last: int) -> tuple[int, LogCheck, int] | None:
    """(version, check, physical end) of the newest commit in [first, last] that moved the cursor, if there is one: what
    a replaced log is compared with. One GET for each commit looked at."""
    for version in range(last, first - 1, -1):
        draft = read_commit(store, version).draft
        if draft.kind == CommitKind.APPEND and draft.to_phys > draft.from_phys:
            return version, draft.check, draft.to_phys
    return None


def _start(store: ObjectStore, commit: Commit) -> CatalogState:
    """The newest root at or below ``commit``; from nothing if there is none or it is gone."""
    root = commit.root
    if not root.key:
        return CatalogState()
    try:
        state = _read_root(store, root)
    except NotFoundError:
        # Roots of versions long past are garbage, commits are kept: the whole chain still tells.
        return CatalogState()
    if state.put_id:
        return state
    return replace(state, put_id=read_commit(store, root.version).put_id)


def _read_root(store: ObjectStore, root: RootRef) -> CatalogState:
    source = f"{store.url}/{root.key}"
    state = decode_root(read_page_bytes(store, root.key), source=source)
    if state.version != root.version:
        raise CorruptionError(f"{source} is the root of version {state.version}, not {root.version}")
    return state


def _commits(store: ObjectStore, versions: Sequence[int]) -> Iterator[Commit]:
    if len(versions) < READ_THREADS // 2:
        yield from (read_commit(store, version) for version in versions)
        return
    with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="catalog") as pool:
        for first in range(0, len(versions), REPLAY_MAX):
            yield from pool.map(
                lambda version: read_commit(store, version), versions[first : first + REPLAY_MAX]
            )
