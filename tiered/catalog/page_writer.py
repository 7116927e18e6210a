"""Schedules the pages of a catalog writer: spills, roots, merges, deletion lists. A page never delays a commit.

Roots, pages and deletion lists are objects, which are collected when newer ones replace them. Until a commit names such
an object its key is recorded as garbage. A page that cannot be written is retried some commits later.

A merge runs beside commits: it reads immutable pages only, and the next commit names its result if the pages it
replaces still exist.

Owns the schedule, and the PUTs and keys of page objects. Encoding is in pages.py and
snapshot.py, merging in page_merge.py, commits in catalog_writer.py.

Packs the pages of one catalog change into objects. Until one is put, a page's name is its position in a pack.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from tiered.catalog.commit import NO_PAGES, CommitDraft, PageChange, encode_root
from tiered.catalog.deletions import DeletionChange, due_to_spill, encode_list, list_of
from tiered.catalog.page_merge import merge, sequence_to_merge
from tiered.catalog.pages import PutPage, RunIndex, spill
from tiered.catalog.state import CatalogState, PageRef, RootRef
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import WITHOUT_EFFECT, CorruptionError, NotFoundError, UnavailableError
from tiered.formats.keys import object_of, page_key, parse_part_key, part_key
from tiered.object_store.interface import ObjectStore, put_own

PutPack = Callable[[int, Sequence[bytes]], str]
"""(version, pages) -> key of the durable object with them; raises what the object store raises."""


class PagePacks:
    """Pages in packs of up to ``bytes_max``. Only the last pack is in memory, others are put when full."""

    def __init__(self, put: PutPack, bytes_max: int) -> None:
        self._put = put
        self._bytes_max = bytes_max
        self._keys: list[str] = []
        """Keys of the packs that were put."""
        self._pages: list[bytes] = []
        self._bytes = 0
        self._version = 0
        """The last pack: its pages, their bytes, and the version of the last page."""

    def add(self, version: int, data: bytes) -> str:
        """Add a page (its encoded bytes) of ``version`` to the last pack, after putting that if it is full. Returns a
        temporary key, its place among the packs, which ``put`` replaces by the key of the object."""
        if self._pages and self._bytes + len(data) > self._bytes_max:
            self._close()
        name = part_key(str(len(self._keys)), self._bytes, len(data))
        self._pages.append(data)
        self._bytes += len(data)
        self._version = version
        return name

    def put(self, change: PageChange) -> PageChange:
        """Put the last pack, and return ``change`` with the final keys in place of those that ``add`` returned."""
        if self._pages:
            self._close()
        added: list[PageRef] = [page._replace(key=self._final_key(page.key)) for page in change.added]
        return replace(change, added=tuple(added))

    def _final_key(self, temporary_key: str) -> str:
        """The key of a page in the object of its pack, for the key that ``add`` returned."""
        part = parse_part_key(temporary_key)
        assert part is not None
        return part_key(self._keys[int(part.key)], part.offset, part.length)

    def _close(self) -> None:
        """Put the last pack, and begin another one."""
        self._keys.append(self._put(self._version, self._pages))
        self._pages, self._bytes = [], 0


logger = logging.getLogger(__name__)

PAGE_ATTEMPTS = 3


@dataclass(frozen=True)
class _Merged:
    """A merge of pages whose result is put, but named by no commit yet; valid in its epoch while the pages that it
    replaces exist."""

    epoch: int
    change: PageChange
    keys: Sequence[str]
    """The objects of its pages."""

    def is_valid(self, state: CatalogState) -> bool:
        return state.epoch == self.epoch and set(self.change.removed) <= {page.key for page in state.pages}


class _CancelledError(Exception):
    """The merge ends without a result."""


class PageWriter:
    """The pages of one actor. ``nonce`` makes their keys unique. ``merge`` may run in another thread than the rest."""

    def __init__(self, store: ObjectStore, limits: CatalogLimits, nonce: str) -> None:
        """``nonce`` is part of the keys of all pages. The first commit decides what is due from its state."""
        self._store = store
        self._limits = limits
        self._nonce = nonce
        self._made = 0
        """Keys made so far; each key has its number."""
        self._after_version = 0
        """After a page could not be written, no page is written before this version."""
        self._committed_bytes = self._root_bytes = 0
        """Bytes of commits since the last root, and of that root; 0: unknown."""
        self._spilled_version = -1
        """The version whose commit last moved runs into pages."""
        self._lock = threading.RLock()
        """Guards what ``merge`` shares with commits; never held during a request of a merge."""
        self._merging = threading.Lock()
        """Held during a merge."""
        self._is_cancelled = self._is_aborted = self._is_paused = self._is_spill_late = False
        """Whether the merge in progress must end, no other may begin, merges wait, and spills (``merges_paused``)."""
        self._merged: _Merged | None = None
        """The last merge, until a commit names its result."""
        self.index = RunIndex(store)
        self.garbage: list[str] = []
        """Keys of objects that were put and that no commit names yet, except those of a merge."""

    def with_pages(self, state: CatalogState, draft: CommitDraft) -> CommitDraft:
        """``draft``, the commit after ``state``, with the pages that are due and are put here: runs that move out of
        the state (a spill), a root page (a copy of the state), the result of a merge, lists of pending deletions. If
        the store is unavailable for a page, the commit is made without it."""
        with self._lock:
            merged = self._valid_merge(state)
            if self.garbage:
                draft = replace(draft, pending_deletions=(*draft.pending_deletions, *self.garbage))
            # Runs that the draft removes are still in ``state``, and a spill would write them into pages.
            if state.version < self._after_version or draft.pages is not NO_PAGES or len(draft.removed):
                return draft
            try:
                is_root_due = self._is_root_due(state)
                change = self._due(state, merged, is_root_due)
                if is_root_due and not draft.deletions:
                    draft = replace(draft, deletions=self._spilled_deletions(state))
            except UnavailableError:
                self.postpone(state)
                return draft
            return draft if change is None else replace(draft, pages=change)

    def merge(self, state: CatalogState, *, is_last: bool = False) -> bool:
        """Merge pages of ``state``, if enough of one level are there. Returns whether a result waits for the next
        commit, which names it. During another merge this returns False at once, or waits if ``is_last``: no commit of
        data follows, and fewer pages suffice.

        A merge that fails is tried again some commits later: new data must not wait for older pages.
        """
        if not self._merging.acquire(blocking=is_last):
            return False
        try:
            with self._lock:
                is_due = not self._valid_merge(state) and state.version >= self._after_version
                is_due = is_due and not self._is_paused
            sequences = sequence_to_merge(state.pages, self._limits, is_last=is_last) if is_due else []
            if sequences:
                self._merge(state, sequences)
            with self._lock:
                return self._valid_merge(state) is not None
        finally:
            self._merging.release()

    def cancel_merge(self) -> None:
        """End a merge in progress, and make the objects of a finished one that no commit named pending deletions."""
        self._is_cancelled = True
        with self._merging, self._lock:
            self._is_cancelled = False
            self._forget_merge()

    @property
    def is_paused(self) -> bool:
        """Whether merges are paused."""
        return self._is_paused

    @contextmanager
    def merges_paused(self, *, spills_late: bool = False) -> Iterator[None]:
        """Inside this context no merge of pages is made or named by a commit, so that pages stay which another actor
        works with. ``spills_late``: runs move into pages only when they are twice as many as usual, and a root page is
        due after twice as many commits."""
        self._is_paused, self._is_spill_late = True, spills_late
        self.cancel_merge()
        try:
            yield
        finally:
            self._is_paused = self._is_spill_late = False

    def abort(self) -> None:
        """End a merge in progress, and begin no other."""
        self._is_aborted = True

    def postpone(self, state: CatalogState) -> None:
        """Write no pages in the next commits, after ``state``: a page could not be written, or the commit that named it
        lost its version to another."""
        with self._lock:
            self._after_version = state.version + self._limits.page_retry_commits

    def settled(self, keys: Collection[str], size_bytes: int = 0) -> None:
        """Note that a commit of ``size_bytes`` is made which names the objects ``keys``, or makes them pending
        deletions: they are no longer garbage of this writer."""
        with self._lock:
            self._committed_bytes += size_bytes
            self.garbage[:] = [key for key in self.garbage if key not in keys]
            # Pages that a merge wrote wait in ``_merged`` for the commit that puts them in the place of older ones.
            if self._merged and any(key in keys for key in self._merged.keys):
                self._merged = None

    def put_runs(self, state: CatalogState) -> PutPage:
        """A function that puts a page of runs as an object of its own, in the epoch of ``state``, and returns its
        key."""
        return lambda version, data: self._put_pages(state.epoch, self.garbage, version, [data])

    def new_key(self, kind: str, version: int, epoch: int) -> str:
        """A key that no page had before; ``kind`` is a part of it, such as "root"."""
        with self._lock:
            self._made += 1
            return page_key(kind, version, epoch, f"{self._nonce}_{self._made}")

    def put(self, key: str, pages: Sequence[bytes]) -> None:
        """Put ``pages`` as one object, in one attempt. ``key`` is garbage until a commit names it. Raises what the
        store raises."""
        self._put(key, pages, self.garbage)

    def _put(self, key: str, pages: Sequence[bytes], unnamed: list[str]) -> None:
        """Put ``pages`` as one object, in one attempt. Its key joins ``unnamed``, the keys that a later commit must
        name or make pending deletions, unless the PUT surely had no effect. Raises what the store raises."""
        unnamed.append(key)
        size_bytes = sum(map(len, pages))
        try:
            put_own(self._store, key, pages, timeout_s=self._limits.timeout_s(size_bytes))
        except WITHOUT_EFFECT:
            unnamed.remove(key)
            raise

    def _merge(self, state: CatalogState, sequences: Sequence[Sequence[PageRef]]) -> None:
        """Merge ``sequences`` of pages of ``state``, and keep the result for the next commit to name. An error of the
        store or of a page postpones the merge and is not raised: commits do not depend on merges."""
        keys: list[str] = []
        packs = PagePacks(partial(self._put_pages, state.epoch, keys), self._limits.pack_bytes_max)

        def add(version: int, data: bytes) -> str:
            """Add a page to the packs; each page is a point at which a merge can end early."""
            if self._is_cancelled or self._is_aborted:
                raise _CancelledError
            return packs.add(version, data)

        merged: _Merged | None = None
        try:
            added = merge(self.index, state, sequences, self._limits.page_runs_max, add)
            replaced = [page.key for sequence in sequences for page in sequence]
            change = PageChange(added=tuple(added), removed=replaced, resolved_version=state.version)
            change = packs.put(change)
            merged = _Merged(state.epoch, change, [object_of(page.key) for page in change.added])
        except _CancelledError:
            pass
        except (UnavailableError, CorruptionError, NotFoundError) as error:
            if not isinstance(error, UnavailableError):
                logger.warning(
                    "pages of the catalog could not be merged; the merge is tried again some commits later: %s",
                    error,
                )
            self.postpone(state)
        finally:
            with self._lock:
                in_result = set(merged.keys) if merged else set()
                self.garbage += [key for key in keys if key not in in_result]
                self._merged = merged

    def _is_root_due(self, state: CatalogState) -> bool:
        """Whether the next commit should name a new root page (a copy of the state, where readers start): the commits
        since the last one cost readers more than a new one costs the writer."""
        commits = state.version - state.root.version
        if state.needs_root or commits >= self._limits.root_every_max * self._late_factor:
            return True
        if self._is_spill_late:
            return False
        due_bytes = self._limits.root_bytes_factor * self._root_bytes
        return commits >= self._limits.root_every and self._committed_bytes >= due_bytes

    @property
    def _late_factor(self) -> int:
        """How many times later than usual root pages and spills are due."""
        return 2 if self._is_spill_late else 1

    def _spilled_deletions(self, state: CatalogState) -> DeletionChange:
        """Put lists of those pending deletions of ``state`` of which there are many, and return the change by which the
        next commit names the lists in place of the single entries. Raises what the store raises."""
        lists = []
        for entries in due_to_spill(state.pending_deletions, self._limits.spill_deletions):
            data = encode_list(entries)
            key = self.new_key("deletions", state.version, state.epoch)
            self.put(key, [data])
            lists.append(list_of(key, entries, len(data)))
        return DeletionChange(spilled=tuple(lists))

    def _due(self, state: CatalogState, merged: _Merged | None, is_root_due: bool) -> PageChange | None:
        """Put the pages that the commit after ``state`` is to name, and return the change that names them, with that
        of a finished merge, ``merged``; None if nothing is due. Raises what the store raises."""
        packs = PagePacks(partial(self._put_pages, state.epoch, self.garbage), self._limits.pack_bytes_max)
        change = NO_PAGES
        # A root page repeats the runs that are in no page, so the commit before it moves these into pages.
        is_spill_due = is_root_due and state.memory_runs > self._limits.root_runs_max
        is_spill_due = is_spill_due and self._spilled_version != state.version
        if is_spill_due or state.memory_runs >= self._limits.spill_runs * self._late_factor:
            added = spill(state, self._limits.page_runs_max, packs.add)
            change = packs.put(replace(change, spilled_version=state.version, added=tuple(added)))
            self._spilled_version = state.version + 1
        if is_root_due and not is_spill_due:
            data = encode_root(state)
            key = self.new_key("root", state.version, state.epoch)
            self.put(key, [data])
            change = replace(change, root=RootRef(key, state.version))
            self._committed_bytes, self._root_bytes = 0, len(data)
        if merged:
            change = replace(
                change,
                added=(*merged.change.added, *change.added),
                removed=merged.change.removed,
                resolved_version=merged.change.resolved_version,
            )
        return None if change is NO_PAGES else change

    def _valid_merge(self, state: CatalogState) -> _Merged | None:
        """The finished merge whose result the commit after ``state`` may name; None: there is none. One that another
        commit has made useless becomes garbage."""
        if self._merged is not None and not self._merged.is_valid(state):
            self._forget_merge()
        return self._merged

    def _forget_merge(self) -> None:
        """Make the objects of a finished merge garbage, if there is one."""
        if self._merged is not None:
            self.garbage += self._merged.keys
            self._merged = None

    def _put_pages(self, epoch: int, uncommitted: list[str], version: int, pages: Sequence[bytes]) -> str:
        """Put ``pages`` of ``version`` as one object, and return its key. An unavailable store is tried PAGE_ATTEMPTS
        times, each time under a new key, as an unanswered PUT may still take effect. All keys are added to
        ``uncommitted``: they are garbage unless a commit names them."""
        for attempts_left in reversed(range(PAGE_ATTEMPTS)):
            key = self.new_key("runs", version, epoch)
            try:
                self._put(key, pages, uncommitted)
                break
            except UnavailableError:
                if not attempts_left:
                    raise
        return key
