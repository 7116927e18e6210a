"""When a writer of the catalog puts pages: runs that leave memory, roots, merges. A page never holds up a commit.

Until a commit names a page its key counts as given up, so that a crash leaves garbage that is known. A page that cannot
be written now is tried again some commits later.

Owns the PUTs of pages and their keys; their bytes are in pages.py and snapshot.py, merging in page_merge.py, commits in
protocol.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from tiered.catalog.commit import NO_PAGES, CommitDraft, PageChange
from tiered.catalog.limits import CatalogLimits
from tiered.catalog.page_merge import merge, sequence_to_merge
from tiered.catalog.pages import PutPage, RunIndex, spill
from tiered.catalog.snapshot import encode_root
from tiered.catalog.state import CatalogState, RootRef
from tiered.errors import UnavailableError
from tiered.formats.keys import page_key
from tiered.object_store.protocol import ObjectStore

PAGE_ATTEMPTS = 3


class PageWriter:
    """One actor's pages. ``nonce`` makes their keys its own."""

    def __init__(self, store: ObjectStore, limits: CatalogLimits, nonce: str) -> None:
        self._store = store
        self._limits = limits
        self._nonce = nonce
        self._made = 0
        self._after_version = 0
        self.index = RunIndex(store)
        self.given_up: list[str] = []
        """Keys that no commit has named yet."""

    def with_pages(self, state: CatalogState, draft: CommitDraft) -> CommitDraft:
        """``draft`` and, when due, a spill or a root. A page that cannot be written now waits; the commit does not."""
        if self.given_up:
            draft = replace(draft, doomed=(*draft.doomed, *self.given_up))
        if state.version < self._after_version or draft.pages is not NO_PAGES:
            return draft
        try:
            if state.memory_runs >= self._limits.spill_runs:
                added = spill(state, self._limits.page_runs_max, self.put_runs(state))
                change = PageChange(spilled_version=state.version, added=tuple(added))
            elif state.version - state.root.version >= self._limits.root_every:
                key = self.new_key("root", state.version, state.epoch)
                self.put(key, encode_root(state))
                change = PageChange(root=RootRef(key, state.version))
            else:
                return draft
        except UnavailableError:
            self.postpone(state)
            return draft
        return replace(draft, pages=change)

    def merged(self, state: CatalogState) -> PageChange | None:
        """One level merged, if it is full; the change waits for its commit. Postponed by a store that is away."""
        sequences = sequence_to_merge(state.pages, self._limits.merge_sequences)
        if not sequences or state.version < self._after_version:
            return None
        try:
            added = merge(self.index, state, sequences, self._limits.page_runs_max, self.put_runs(state))
        except UnavailableError:
            self.postpone(state)
            return None
        gone = [page.key for sequence in sequences for page in sequence]
        return PageChange(added=tuple(added), removed=gone, resolved_version=state.version)

    def postpone(self, state: CatalogState) -> None:
        """No page for a while: one could not be written, or the commit that named it lost."""
        self._after_version = state.version + self._limits.page_retry_commits

    def settled(self, keys: Collection[str]) -> None:
        """A commit has named these, or given them up."""
        self.given_up = [key for key in self.given_up if key not in keys]

    def put_runs(self, state: CatalogState) -> PutPage:
        """Puts a page of runs; a few attempts, each under a key of its own, so that one of many pages may fail."""
        return partial(self._put_runs, state.epoch)

    def _put_runs(self, epoch: int, version: int, data: bytes) -> str:
        for attempts_left in reversed(range(PAGE_ATTEMPTS)):
            key = self.new_key("runs", version, epoch)
            try:
                self.put(key, data)
                break
            except UnavailableError:
                if not attempts_left:
                    raise
        return key

    def new_key(self, kind: str, version: int, epoch: int) -> str:
        """A key that no other page has."""
        self._made += 1
        return page_key(kind, version, epoch, f"{self._nonce}_{self._made}")

    def put(self, key: str, data: bytes) -> None:
        """One attempt; until a commit names ``key`` it counts as given up."""
        self.given_up.append(key)
        self._store.put_if_absent(key, [data], timeout_s=self._limits.put_timeout_s)
