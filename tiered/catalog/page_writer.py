"""Schedules the pages of a catalog writer: spills, roots, merges. A page never delays a commit.

Pages are embedded in the commit that names them, so that a cycle is one PUT; large ones (a merge of a high level) are
put before it as an object. Until a commit names such an object its key is recorded as garbage, so that a crash leaves
only known garbage. A page that cannot be written is retried some commits later.

Owns the schedule, and the PUTs and keys of page objects. Encoding is in pages.py and snapshot.py, placement in
page_packs.py, merging in page_merge.py, commits in catalog_writer.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tiered.catalog.commit import NO_PAGES, CommitDraft, PageChange
from tiered.catalog.page_merge import merge, sequence_to_merge
from tiered.catalog.page_packs import PagePacks
from tiered.catalog.pages import PutPage, RunIndex, spill
from tiered.catalog.snapshot import encode_root
from tiered.catalog.state import CatalogState, RootRef
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import WITHOUT_EFFECT, CorruptionError, NotFoundError, UnavailableError
from tiered.formats.keys import object_of, page_key
from tiered.object_store.interface import ObjectStore
from tiered.object_store.own_name import put_own

logger = logging.getLogger(__name__)

PAGE_ATTEMPTS = 3


@dataclass(frozen=True)
class _Merged:
    """An uncommitted merge; valid in its epoch while the pages it replaces exist."""

    epoch: int
    change: PageChange
    packs: PagePacks | None
    """Its pages, to be embedded in a commit; None: they are objects."""

    def is_valid(self, state: CatalogState) -> bool:
        return state.epoch == self.epoch and set(self.change.removed) <= {page.key for page in state.pages}


class PageWriter:
    """The pages of one actor. ``nonce`` makes their keys unique."""

    def __init__(self, store: ObjectStore, limits: CatalogLimits, nonce: str) -> None:
        self._store = store
        self._limits = limits
        self._nonce = nonce
        self._made = 0
        self._after_version = 0
        self._merged: _Merged | None = None
        self.index = RunIndex(store)
        self.garbage: list[str] = []
        """Keys that no commit references yet."""

    def with_pages(self, state: CatalogState, draft: CommitDraft) -> CommitDraft:
        """``draft`` as the next version with a spill, root or merge when due. If a page cannot be written, the commit
        proceeds without it."""
        merged = self._valid_merge(state)
        wanted = (
            {object_of(page.key) for page in merged.change.added} if merged and not merged.packs else set()
        )
        garbage = [key for key in self.garbage if key not in wanted]
        if garbage:
            draft = replace(draft, pending_deletions=(*draft.pending_deletions, *garbage))
        if state.version < self._after_version or draft.pages is not NO_PAGES:
            return draft
        try:
            change = self._due(state, merged)
        except UnavailableError:
            self.postpone(state)
            return draft
        return draft if change is None else replace(draft, pages=change)

    def merge(self, state: CatalogState) -> None:
        """Merge a full level; the next commit names the result. Postponed when the store is unavailable or an older
        page is damaged: new data must not wait for lost data."""
        sequences = sequence_to_merge(state.pages, self._limits.merge_sequences)
        if not sequences or self._valid_merge(state) or state.version < self._after_version:
            return
        packs: PagePacks | None = self._packs(state)
        assert packs is not None
        try:
            added = merge(self.index, state, sequences, self._limits.page_runs_max, packs.add)
            gone = [page.key for sequence in sequences for page in sequence]
            change = PageChange(added=tuple(added), removed=gone, resolved_version=state.version)
            if not packs.fit(self._limits.embedded_bytes_max):
                change, packs = packs.put(change), None
        except (UnavailableError, CorruptionError, NotFoundError) as error:
            if not isinstance(error, UnavailableError):
                logger.warning("older catalog pages not merged: %s", error)
            self.postpone(state)
            return
        self._merged = _Merged(state.epoch, change, packs)

    def postpone(self, state: CatalogState) -> None:
        """Postpone pages: one could not be written, or the commit that named it lost."""
        self._after_version = state.version + self._limits.page_retry_commits

    def settled(self, keys: Collection[str]) -> None:
        """A commit referenced these keys, or made them pending deletions."""
        self.garbage = [key for key in self.garbage if key not in keys]

    def put_runs(self, state: CatalogState) -> PutPage:
        """Puts a page of runs as an object; see ``_put_pages``."""
        return lambda version, data: self._put_pages(state.epoch, version, [data])

    def new_key(self, kind: str, version: int, epoch: int) -> str:
        """A unique page key."""
        self._made += 1
        return page_key(kind, version, epoch, f"{self._nonce}_{self._made}")

    def put(self, key: str, pages: Sequence[bytes]) -> None:
        """One attempt; ``key`` is garbage until a commit references it."""
        self.garbage.append(key)
        try:
            put_own(self._store, key, pages, timeout_s=self._limits.timeout_s(sum(map(len, pages))))
        except WITHOUT_EFFECT:
            self.garbage.remove(key)
            raise

    def _due(self, state: CatalogState, merged: _Merged | None) -> PageChange | None:
        """The page change of the commit after ``state``; pages that are not embedded are put."""
        packs = merged.packs.copy() if merged and merged.packs else self._packs(state)
        change = merged.change if merged and merged.packs else NO_PAGES
        if state.memory_runs >= self._limits.spill_runs:
            added = spill(state, self._limits.page_runs_max, packs.add)
            change = replace(change, spilled_version=state.version, added=(*change.added, *added))
        if state.needs_root or state.version - state.root.version >= self._limits.root_every:
            key = packs.add(state.version, encode_root(state))
            change = replace(change, root=RootRef(key, state.version))
        if change is not NO_PAGES:
            change = packs.placed(change, state.version + 1, self._limits.embedded_bytes_max)
        if merged and not merged.packs:
            change = replace(
                change,
                added=(*merged.change.added, *change.added),
                removed=merged.change.removed,
                resolved_version=merged.change.resolved_version,
            )
        return None if change is NO_PAGES else change

    def _valid_merge(self, state: CatalogState) -> _Merged | None:
        if self._merged is not None and not self._merged.is_valid(state):
            self._merged = None
        return self._merged

    def _packs(self, state: CatalogState) -> PagePacks:
        return PagePacks(partial(self._put_pages, state.epoch), self._limits.pack_bytes_max)

    def _put_pages(self, epoch: int, version: int, pages: Sequence[bytes]) -> str:
        """Pages as one object; a few attempts, each under its own key."""
        for attempts_left in reversed(range(PAGE_ATTEMPTS)):
            key = self.new_key("runs", version, epoch)
            try:
                self.put(key, pages)
                break
            except UnavailableError:
                if not attempts_left:
                    raise
        return key
