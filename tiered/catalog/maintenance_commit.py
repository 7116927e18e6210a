"""Commits of maintenance: changes by an actor that need not own the archive.

    open at a state → announce the keys of outputs → put them, and lists → commit, if what is required still stands

Owns "may exist, but no commit names it": each key is noted before its PUT. A later commit names it, or makes it a
pending deletion. Keys of outputs that take long are announced by a commit of their own, so that they are garbage if
this process dies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
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
    """Commits of maintenance, by an actor of its own (``opened``), or through the writer of the archive's owner, which
    then never finds that another actor has taken its next version. Not thread-safe."""

    def __init__(self, store: ObjectStore, writer: CatalogWriter, clock: Clock) -> None:
        """``writer`` commits to ``store``, the archive's own prefix."""
        self.store, self._writer, self._clock = store, writer, clock
        self.number = random.SystemRandom().getrandbits(40)
        """A part of keys, unique to this object."""
        self._lists_made = 0
        self._unnamed: list[str] = []
        """Keys of objects that were put and that no commit names yet."""
        self.unmet = ""
        """Why the last commit was not made: the name of the requirement that was not met; empty if all were."""

    @classmethod
    def opened(cls, store: ObjectStore, state: CatalogState, what: str, clock: Clock) -> MaintenanceCommit:
        """Commits of an actor of its own, which need not own the archive, on top of ``state``, which was read before.
        ``what`` names the actor in commits, such as "gc"; a random suffix makes it unique."""
        suffix = f"{random.SystemRandom().getrandbits(48):012x}"
        writer = CatalogWriter(
            store,
            cluster=state.cluster,
            broker=state.broker,
            instance=f"{what}-{suffix}",
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
        """Read the newest state of the catalog, and return it."""
        return self._writer.refresh()

    def merges_paused(self, *, spills_late: bool = False) -> AbstractContextManager[None]:
        """Inside this context the writer merges no pages of the catalog (CatalogWriter.merges_paused)."""
        return self._writer.merges_paused(spills_late=spills_late)

    # -- keys that no commit names yet ------------------------------------------------------------------------

    def announce(self, keys: Sequence[str], required: Requirements = NOTHING) -> bool:
        """Commit that the objects ``keys``, which are yet to be put, are garbage unless a later commit takes them back.
        Returns False without a commit if a requirement is not met."""
        draft = CommitDraft(CommitKind.MAINTENANCE, pending_deletions=tuple(keys), reason=Reason.INTENT)
        return self.commit(lambda _state: draft, required)

    def put(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """Put an object once under a key that only this process uses. Unless a later commit names the object, that
        commit makes it a pending deletion. Raises what the store raises."""
        self._unnamed.append(key)
        try:
            put_own(self.store, key, body, timeout_s=timeout_s)
        except WITHOUT_EFFECT:
            # The store has surely not created the object: nothing is left to delete.
            self._unnamed.remove(key)
            raise

    def put_list(self, state: CatalogState, entries: Mapping[str, PendingDeletion]) -> DeletionList:
        """Put the object that lists ``entries`` (by key of the object to be deleted), and return what a commit after
        ``state`` needs to name it. Raises what the store raises."""
        data = encode_list(entries)
        self._lists_made += 1
        key = page_key("deletions", state.version, state.epoch, f"{self.number:010x}_{self._lists_made}")
        self.put(key, [data], timeout_s=LIST_TIMEOUT_S)
        return list_of(key, entries, len(data))

    # -- commits ----------------------------------------------------------------------------------------------

    def commit(
        self, change: Callable[[CatalogState], CommitDraft | None], required: Requirements = NOTHING
    ) -> bool:
        """Commit what ``change`` makes of the newest state, if that meets all that is ``required``. Objects that were
        put and that the commit does not name become pending deletions by it.

        Returns False without a commit if a requirement is not met (``unmet`` names it) or ``change`` returns None.
        ``change`` is called again when another actor committed first."""
        is_committed = False

        def build(newest: CatalogState) -> CommitDraft | None:
            """The commit that may follow ``newest``; None if none is to be made. Called again for each newer state."""
            nonlocal is_committed
            is_committed = False
            self.unmet = required.unmet(newest) or self._compacted_since(newest, required.uncompacted_since)
            draft = None if self.unmet else change(newest)
            if draft is None:
                return None
            is_committed = True
            garbage = self._unnamed_after(newest, draft)
            return replace(
                draft,
                pending_deletions=(*draft.pending_deletions, *garbage),
                created_ms=self._clock.wall_ms(),
            )

        self._writer.maintain(build)
        if is_committed:
            self._unnamed.clear()
        return is_committed

    def _unnamed_after(self, newest: CatalogState, draft: CommitDraft) -> list[str]:
        """Keys of objects that were put and that neither ``draft`` nor the state ``newest`` names: garbage."""
        named = {
            *(index.key for index in draft.index.added),
            *(listed.key for listed in draft.deletions.added),
            *(timers.key for timers in draft.timers),
            *draft.object_keys,
            *draft.restored,
            *draft.pending_deletions,
            *newest.pending_deletions,
            *newest.catalog_keys(),
        }
        return [key for key in self._unnamed if key not in named]

    def _compacted_since(self, newest: CatalogState, version: int | None) -> str:
        """The name of the requirement that no compaction was committed after ``version``, if one was; else empty."""
        after = range(newest.version + 1 if version is None else version + 1, newest.version + 1)
        is_compacted = any(read_commit(self.store, at).draft.reason == Reason.COMPACTED for at in after)
        return "objects" if is_compacted else ""
