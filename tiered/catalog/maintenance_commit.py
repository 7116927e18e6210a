"""Commits of maintenance: changes by an actor that need not own the archive.

    open at a state → announce the keys of outputs → put them, and lists → commit, if what is required still stands

Owns "may exist, but no commit names it": each key is noted before its PUT. A later commit names it, or makes it a
pending deletion. Keys of outputs that take long are announced by a commit of their own, so that they are garbage if
this process dies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from tiered.catalog.catalog_reader import read_commit
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import DeletionList, PendingDeletion, Reason, encode_list, list_of
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import WITHOUT_EFFECT
from tiered.formats.keys import page_key
from tiered.object_store.interface import Body, ObjectStore, put_own

LIST_TIMEOUT_S = 60.0
NOTHING = Requirements()


class MaintenanceCommit:
    """Commits through ``writer``: of an actor of its own (``opened``), or of the archive's owner, which then loses no
    version to them. Not thread-safe."""

    def __init__(self, store: ObjectStore, writer: CatalogWriter, clock: Clock) -> None:
        """``writer`` commits to ``store``, the archive's own prefix."""
        self.store, self._writer, self._clock = store, writer, clock
        self.number = random.SystemRandom().getrandbits(40)
        """A part of keys, unique to this object."""
        self._made = 0
        self._unnamed: list[str] = []
        self.unmet = ""
        """What did not stand at the last commit that was not made."""

    @classmethod
    def opened(cls, store: ObjectStore, state: CatalogState, what: str, clock: Clock) -> MaintenanceCommit:
        """Commits on top of ``state``, which was read before, as an actor named after ``what``."""
        nonce = f"{random.SystemRandom().getrandbits(48):012x}"
        writer = CatalogWriter(
            store,
            cluster=state.cluster,
            broker=state.broker,
            instance=f"{what}-{nonce}",
            kind="maintenance",
            clock=clock,
        )
        return cls(store, writer.begin_at(state), clock)

    @property
    def state(self) -> CatalogState:
        """The newest state known."""
        return self._writer.state

    @property
    def unnamed(self) -> Sequence[str]:
        """Keys that may exist, and that no commit names."""
        return self._unnamed

    def refresh(self) -> CatalogState:
        """Catch up with the archive."""
        return self._writer.refresh()

    def merges_paused(self, *, spills_late: bool = False) -> AbstractContextManager[None]:
        return self._writer.merges_paused(spills_late=spills_late)

    # -- keys that no commit names yet ------------------------------------------------------------------------

    def announce(self, keys: Sequence[str], required: Requirements = NOTHING) -> bool:
        """Commit that ``keys`` are garbage unless a later commit takes them back. False: no longer required."""
        draft = CommitDraft(CommitKind.MAINTENANCE, pending_deletions=tuple(keys), reason=Reason.INTENT)
        return self.commit(lambda _state: draft, required)

    def put(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """One PUT of a key that only this object uses. Raises what the store raises."""
        self._unnamed.append(key)
        try:
            put_own(self.store, key, body, timeout_s=timeout_s)
        except WITHOUT_EFFECT:
            self._unnamed.remove(key)
            raise

    def put_list(self, state: CatalogState, entries: Mapping[str, PendingDeletion]) -> DeletionList:
        """A list of pending deletions, for a commit after ``state``."""
        data = encode_list(entries)
        self._made += 1
        key = page_key("deletions", state.version, state.epoch, f"{self.number:010x}_{self._made}")
        self.put(key, [data], timeout_s=LIST_TIMEOUT_S)
        return list_of(key, entries, len(data))

    # -- commits ----------------------------------------------------------------------------------------------

    def commit(
        self, change: Callable[[CatalogState], CommitDraft | None], required: Requirements = NOTHING
    ) -> bool:
        """Commit what ``change`` makes of the newest state, if ``required`` stands in it. False: it does not, or there
        is nothing to change. ``change`` is called again when another actor committed first."""
        is_committed = False

        def build(newest: CatalogState) -> CommitDraft | None:
            """Build the commit on the newest state, or None if what it requires no longer stands there."""
            nonlocal is_committed
            is_committed = False
            self.unmet = required.unmet(newest, self._is_compacted)
            draft = None if self.unmet else change(newest)
            if draft is None:
                return None
            is_committed = True
            garbage = self._left(newest, draft)
            return replace(
                draft,
                pending_deletions=(*draft.pending_deletions, *garbage),
                created_ms=self._clock.wall_ms(),
            )

        self._writer.maintain(build)
        if is_committed:
            self._unnamed.clear()
        return is_committed

    def _left(self, newest: CatalogState, draft: CommitDraft) -> Iterable[str]:
        """Noted keys that neither ``draft`` nor ``newest`` names."""
        if not self._unnamed:
            return ()
        named = {index.key for index in draft.index.added} | {listed.key for listed in draft.deletions.added}
        named |= {timers.key for timers in draft.timers}
        named |= {
            *draft.object_keys,
            *draft.restored,
            *draft.pending_deletions,
            *newest.pending_deletions,
            *newest.catalog_keys(),
        }
        return [key for key in self._unnamed if key not in named]

    def _is_compacted(self, first: int, last: int) -> bool:
        commits = (read_commit(self.store, version) for version in range(first, last + 1))
        return any(commit.draft.reason == Reason.COMPACTED for commit in commits)
