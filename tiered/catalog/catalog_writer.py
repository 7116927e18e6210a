"""Commits to the catalog: create-if-absent of the next version, and nothing else.

    build the commit on the newest state known → check it locally → PUT version + 1 until won or lost
    lost: catch up with the head; a higher epoch → FencedError; else build again on the newer state

A commit without a response is settled before other content is tried, even across failed calls. One writer object per
process and archive; public methods are thread-safe. Commits are made one at a time, merges of pages beside them. Pages
are in page_writer.py, retries in store_retry.py.
"""

from __future__ import annotations

import random as random_module
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tiered.catalog.apply import apply
from tiered.catalog.catalog_reader import head_version, load, refresh
from tiered.catalog.claims import refusal
from tiered.catalog.commit import (
    NO_PAGES,
    Commit,
    CommitDraft,
    CommitInvalidError,
    CommitKind,
    CommitPlace,
    PageChange,
    encode_commit,
    encode_root,
)
from tiered.catalog.commit_attempt import CommitAttempt
from tiered.catalog.deletions import Reason, read_list
from tiered.catalog.hidden_history import read_hidden
from tiered.catalog.log_histories import Divergence, HistoryPages, NewHistory, begin_history, ends_below
from tiered.catalog.page_writer import PageWriter
from tiered.catalog.retirement import retirement
from tiered.catalog.returned_history import Hidden, return_to
from tiered.catalog.run_cuts import RunCuts
from tiered.catalog.state import NO_ROOT, CatalogState, LogCheck, Owner
from tiered.catalog.store_retry import StoreRetry
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import FencedError, UsageError
from tiered.model.queue import QueueKey
from tiered.object_store.interface import Body, ObjectStore

INTENT_MS = 3_600_000
"""A compaction that has announced its outputs so long ago has ended, with or without a commit."""

HEAD_CHECK_MS = 10_000
"""A writer that has not seen the head for so long, as one that was paused, looks for it after its next commit."""

T = TypeVar("T")
Built = tuple[CommitDraft, NewHistory | None]
"""What is to be committed, and the log history that it starts, if any."""


@dataclass(frozen=True)
class _Pending:
    """A commit whose outcome is unknown. ``source``: what the caller wanted committed; ``body``: the encoded
    ``commit``; ``next_state``: the state if it is won."""

    source: CommitDraft
    commit: Commit
    body: Body
    next_state: CatalogState


class CatalogWriter:
    """Commits for one actor. ``store`` is below the archive's prefix.

    ``instance`` identifies the actor across restarts of one process at a time. ``random`` gives put ids and jitter.
    ``background`` runs a merge of pages, which may take minutes; default: in the thread of ``append``, after it.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        cluster: str,
        broker: str,
        instance: str,
        kind: str,
        clock: Clock,
        host: str = "",
        root_every: int | None = None,
        limits: CatalogLimits | None = None,
        random: random_module.Random | None = None,
        wait: Callable[[float], object] | None = None,
        background: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """``kind`` and ``host`` tell operators who owns an archive; ``root_every``: versions between two root pages,
        if other than in ``limits``."""
        limits = limits or CatalogLimits()
        self._store = store
        self._cluster, self._broker = cluster, broker
        self._instance, self._kind, self._host = instance, kind, host
        self._clock = clock
        self._limits = limits if root_every is None else replace(limits, root_every=root_every)
        source = random or random_module.SystemRandom()
        self._nonce = f"{source.getrandbits(64):016x}"
        """A part of put ids and page keys, unique to this writer."""
        self._retry = StoreRetry(self._limits, source, wait)
        self._pages = PageWriter(store, self._limits, self._nonce)
        self._background = background or (lambda work: work())
        self._attempt = CommitAttempt(store, self._limits, self._retry)
        self._lock = threading.RLock()
        self._state = CatalogState()
        """The newest known state, of any epoch."""
        self._own_state: CatalogState | None = None
        """The newest state of this writer's epoch; None: it has not claimed one."""
        self._epoch: int | None = None
        """The epoch that this writer claimed and has not released."""
        self._pending: _Pending | None = None
        """A commit that was put, and of which it is not known whether it exists."""
        self._head_ms = 0
        """When the newest version was last looked for."""

    # -- what is known ----------------------------------------------------------------------------------------

    @property
    def state(self) -> CatalogState:
        """The newest known state; an empty one before ``load``. A writer that has claimed the archive sees the newest
        state of its own epoch: after another one took over, it must not put data under that one's epoch.
        """
        return self._state if self._own_state is None else self._own_state

    @property
    def state_or_none(self) -> CatalogState | None:
        """``state``, or None while no commit has moved the cursor."""
        return self.state if self.state.started else None

    @property
    def retry_reason(self) -> str:
        """Why a commit or a read of the catalog is being retried; empty when none is."""
        return self._retry.retry_reason

    @property
    def is_claimed(self) -> bool:
        """Whether this writer owns the newest known epoch."""
        owner = self._state.owner
        return (
            self._epoch is not None
            and self._epoch == self._state.epoch
            and owner is not None
            and not owner.released
        )

    def load(self) -> CatalogState | None:
        """Read the newest state, unless it is known; None while no commit has archived any of the log.

        Raises UsageError when the archive is of another cluster or broker, and what reading the catalog raises.
        """
        with self._lock:
            head, self._head_ms = head_version(self._store), self._clock.wall_ms()
            if head > self._state.version:
                self._move_to(load(self._store, version=head))
            names = (self._state.cluster, self._state.broker)
            if self._state.version and names != (self._cluster, self._broker):
                raise UsageError(
                    f"{self._store.url} holds the archive of {names[0]}/{names[1]}, "
                    f"not of {self._cluster}/{self._broker}"
                )
            return self._state if self._state.started else None

    def begin_at(self, state: CatalogState) -> CatalogWriter:
        """Use ``state``, which was read before, instead of loading one; returns this writer."""
        self._state = state
        return self

    def refresh(self) -> CatalogState:
        """Read the newest state of the catalog and return it: a fenced writer, and one that stands by, learn here what
        others have committed."""
        with self._lock:
            self._move_to(refresh(self._store, self._state))
            return self._state

    def abort(self) -> None:
        """Make calls that wait for the store raise UnavailableError, now and from now on, and end a merge of pages. May
        be called from any thread."""
        self._retry.abort()
        self._pages.abort()

    def merges_paused(self, *, spills_late: bool = False) -> AbstractContextManager[None]:
        """Inside this context no merge replaces pages of the catalog, as the work of another actor of this process on
        them would be void. ``spills_late``: the work is on runs that are in no page, so that they move into pages
        later than usual."""
        return self._pages.merges_paused(spills_late=spills_late)

    # -- commits ----------------------------------------------------------------------------------------------

    def claim(self, *, take_over: bool = False) -> CatalogState:
        """Become the archive's only writer, by a commit that begins the next epoch. Required before data is put.

        ``take_over``: the caller has decided that the present owner may lose the archive (the broker is master, by
        command, or the log contains records unarchived for too long). Raises FencedError when it may not, or another
        claimant was faster.
        """
        with self._lock:
            self._settle()
            self._retry.call(self.load)
            epoch_before = self._state.epoch

            def build(state: CatalogState) -> Built:
                """The claim as the commit after ``state``. Raises FencedError if another writer has claimed the archive
                since, or its owner may not lose it."""
                now_ms = self._clock.wall_ms()
                owner = Owner(self._instance, self._kind, self._host, now_ms, False)
                if state.epoch != epoch_before:
                    raise FencedError(
                        f"the archive's epoch {state.epoch} was claimed by {_name(state.owner)} at the same time"
                    )
                reason = refusal(state, owner, take_over=take_over, now_ms=now_ms)
                if reason:
                    raise FencedError(
                        reason,
                        hint="stop that writer; if it is dead, repeat this command with --take-over",
                    )
                return CommitDraft(CommitKind.CLAIM, owner=owner, created_ms=now_ms), None

            self._epoch, self._own_state = None, None
            self._commit(CommitDraft(CommitKind.CLAIM), build, epoch_step=1)
            self._epoch, self._own_state = self._state.epoch, self._state
            return self._state

    def append(self, draft: CommitDraft) -> CatalogState:
        """Commit ``draft``; returns the state with it.

        Retries while the store is unavailable, until ``abort``. Raises FencedError, CommitInvalidError (nothing was
        written), UnavailableError after ``abort``, and errors that retries cannot fix. After UnavailableError the
        commit may or may not exist: call again with the same draft.
        """
        if draft.kind not in (CommitKind.APPEND, CommitKind.MAINTENANCE):
            raise CommitInvalidError(
                f"a commit of the kind {draft.kind} is made by a method of its own, and cannot be appended"
            )
        with self._lock:
            pages = self._state.pages
            self._commit(draft, lambda state: (self._pages.with_pages(self._owned(state), draft), None))
            has_new_pages = self._state.pages is not pages
            state = self.state
        if has_new_pages:
            self._background(self._merge_pages)
        return state

    def append_history(
        self, *, common_version: int, phys: int, check: LogCheck | None = None, above_version: int = 0
    ) -> CatalogState:
        """Start a new log history, after the broker's log was truncated or replaced, at the commitlog offset ``phys``.

        ``common_version``: the newest version of which all is in the new log as well; 0: none. ``phys`` is its end, or,
        with a ``check`` (checksum of the log below ``phys``), the end of a record of the next commit of the log, which
        is ``above_version``. Raises CommitInvalidError, FencedError and what the store raises."""
        with self._lock:
            common, above = (
                self._retry.call(lambda: load(self._store, version=version)) if version else None  # noqa: B023
                for version in (common_version, above_version)
            )

            def build(state: CatalogState) -> Built:
                return self._history(self._owned(state), common, phys, check=check, above=above)

            self._commit(CommitDraft(CommitKind.LOG_HISTORY), build)
            return self._state

    def ends_below(self, phys: int) -> dict[QueueKey, int]:
        """The queues that have messages at or above the commitlog offset ``phys``, and the offset of the first of them.
        Only after a repair, which may find messages above the place from which on the log is to be read."""
        return self._retry.call(lambda: ends_below(self._state, phys, self._history_pages(self._state)))

    def end_queues(self, ends: Mapping[QueueKey, int], from_phys: int) -> CatalogState:
        """Start a log history of the same log, in which the queues of ``ends`` end at these queue offsets: the broker
        used later ones again. Their messages above are hidden like those of a truncated log. ``from_phys``: where the
        log is read next."""
        with self._lock:

            def build(state: CatalogState) -> Built:
                """The begin of the log history as the commit after ``state``."""
                phys = state.cursor.phys if state.started else from_phys
                return self._history(self._owned(state), state, phys, ends=ends)

            self._commit(CommitDraft(CommitKind.LOG_HISTORY), build)
            return self._state

    def return_to(self, version: int) -> CatalogState:
        """Start a new log history that continues the earlier ``version``, as the broker's earlier log was put back: the
        messages that it had become visible again. Raises CommitInvalidError if some of them are gone."""
        with self._lock:
            target = self._retry.call(lambda: load(self._store, version=version))

            def build(state: CatalogState) -> Built:
                """The begin of the log history as the commit after ``state``."""
                return self._retry.call(lambda: self._build_return(self._owned(state), target))

            self._commit(CommitDraft(CommitKind.LOG_HISTORY), build)
            return self._state

    def maintain(self, build: Callable[[CatalogState], CommitDraft | None]) -> CatalogState:
        """Commit what ``build`` makes of the newest state, also if another writer owns the archive; if it returns None,
        nothing is committed. Returns the newest state. ``build`` is called again when another actor committed first.
        """
        with self._lock:

            def built(state: CatalogState) -> Built | None:
                """The commit after ``state``, with pages if this writer owns the archive."""
                draft = build(state)
                if draft is None:
                    return None
                return (self._pages.with_pages(state, draft) if self.is_claimed else draft), None

            if self._state.version == 0:
                self._retry.call(self.load)
            self._commit(CommitDraft(CommitKind.MAINTENANCE), built)
            return self._state

    def finish_merges(self) -> CatalogState:
        """Merge catalog pages at the end of a backfill, and commit the results. A merge that fails ends this, and the
        pages stay as they are. Returns the newest state."""

        def build(_state: CatalogState) -> CommitDraft | None:
            """An empty commit, which names the merged pages; None if this writer has lost the archive."""
            draft = CommitDraft(CommitKind.MAINTENANCE, created_ms=self._clock.wall_ms())
            return draft if self.is_claimed else None

        while self.is_claimed and self._pages.merge(self.state, is_last=True):
            self.maintain(build)
        return self.state

    def release(self, *, pending_deletions: Sequence[str] = (), retires: bool = False) -> CatalogState:
        """End this writer's epoch by a commit, so that the next writer need not take over. ``pending_deletions``: keys
        of objects that no commit names. ``retires``: the broker is retired, and nodes may serve the archive under its
        name. Raises FencedError if another writer owns the archive."""
        with self._lock:
            self._pages.cancel_merge()
            draft = CommitDraft(
                CommitKind.RELEASE,
                pending_deletions=tuple(pending_deletions),
                created_ms=self._clock.wall_ms(),
            )

            def build(state: CatalogState) -> Built | None:
                """The release as the commit after ``state``."""
                if self._epoch is not None and not self.is_claimed and state.epoch == self._epoch:
                    return None  # an earlier failed call was committed after all
                self._owned(state)
                settings = retirement(state, self._clock.wall_ms()) if retires else {}
                garbage = (*draft.pending_deletions, *self._pages.garbage)
                return replace(draft, pending_deletions=garbage, settings=settings), None

            self._commit(draft, build)
            self._epoch, self._own_state = None, None
            return self._state

    def _merge_pages(self) -> None:
        """Merge catalog pages, beside commits: the lock is not held during the merge. Does nothing for a writer that
        has lost the archive, as its objects would be of another's epoch."""
        with self._lock:
            state = self._state if self.is_claimed else None
        if state is not None:
            self._pages.merge(state)

    def _move_to(self, state: CatalogState) -> None:
        """Take ``state`` as the newest known one."""
        self._state = state
        if self._epoch == state.epoch:
            self._own_state = state

    def _owned(self, state: CatalogState) -> CatalogState:
        """``state``, if this writer owns the archive in it. Raises FencedError otherwise. Called before every commit
        that only the owner may make."""
        if self._epoch is None:
            raise FencedError(f"this writer has not claimed the archive {self._store.url}")
        if state.epoch != self._epoch:
            raise FencedError(
                f"epoch {self._epoch} of this writer is over: {_name(state.owner)} has epoch {state.epoch}",
                hint="this writer stops archiving; reads of the archive continue",
            )
        return state

    # -- winning a version ------------------------------------------------------------------------------------

    def _commit(
        self, source: CommitDraft, build: Callable[[CatalogState], Built | None], *, epoch_step: int = 0
    ) -> None:
        """Commit what ``build`` makes of the newest state, and build again on the next one until a commit is won;
        nothing is committed if it returns None.

        ``source``: what the caller wants committed. If an earlier call with the same one failed without an answer and
        its commit was made after all, this returns. ``epoch_step``: 1 if the commit begins an epoch."""
        settled = self._settle()
        if settled is not None and settled.source is source:
            return
        if self._is_other_compacting():
            self._move_to(self._retry.call(lambda: refresh(self._store, self._state)))
        while (built := build(self._state)) is not None:
            draft, history = built
            state = self._state
            place = CommitPlace(
                state.version + 1,
                state.epoch + epoch_step,
                state.put_id,
                self._instance,
                self._cluster,
                self._broker,
                state.root,
                state.kept_roots[-1] if state.kept_roots else NO_ROOT,
            )
            commit, container = encode_commit(draft, place, self._nonce)
            next_state = apply(state, commit, None if history is None else history.state)
            self._pending = _Pending(source, commit, [container], next_state)
            if self._settle() is not None:
                return

    def _is_other_compacting(self) -> bool:
        """Whether a compaction of another process has announced its outputs and so will commit soon: then reading the
        next version first costs less than building a commit, with its pages, for a version that is taken."""
        since_ms = self._clock.wall_ms() - INTENT_MS
        is_announced = any(
            pending.reason == Reason.INTENT and pending.since_ms >= since_ms
            for pending in self._state.pending_deletions.values()
        )
        # A compaction of this process pauses merges while it works, and commits through this writer.
        return is_announced and not self._pages.is_paused

    def _settle(self) -> _Pending | None:
        """Put the pending commit again and again until it is known whether it has its version. Returns it if so.
        Returns None if another commit has the version, after reading the newest state, or nothing is pending.
        """
        pending = self._pending
        if pending is None:
            return None
        if self._attempt.is_won(pending.commit, pending.body):
            self._require_head(pending.commit.version)
            self._move_to(pending.next_state)
            self._pending = None
            self._pages.settled(
                {*pending.next_state.catalog_keys(), *pending.commit.draft.pending_deletions},
                sum(map(len, pending.body)),
            )
            return pending
        self._move_to(self._retry.call(lambda: refresh(self._store, self._state)))
        self._pending = None
        if pending.commit.draft.pages is not NO_PAGES:
            self._pages.postpone(self._state)
        return None

    def _require_head(self, version: int) -> None:
        """Check that ``version``, which this writer has just committed, is part of the archive. Raises FencedError if a
        repair has begun a newer chain of commits: the catalog was lost while this writer was paused.

        Takes a request only if the newest version was not looked for in the last HEAD_CHECK_MS."""
        now_ms = self._clock.wall_ms()
        if abs(now_ms - self._head_ms) < HEAD_CHECK_MS:
            return
        head = self._retry.call(lambda: head_version(self._store))
        if (
            head > version
            and self._retry.call(lambda: load(self._store, version=head)).repaired_version > version
        ):
            self._pending = None
            raise FencedError(
                f"the catalog of {self._store.url} was lost and repaired, as version {head}, while this writer was "
                "paused; its last commit is not a part of the archive",
                hint="start this writer again",
            )
        self._head_ms = now_ms

    def _build_return(self, state: CatalogState, target: CatalogState) -> Built:
        """The commit after ``state`` that continues the earlier state ``target``: reads what log histories have hidden
        since, and the pending deletions to be taken back, and puts the pages of the new history. Raises
        CommitInvalidError if messages of ``target`` are gone."""
        lists = [listed for listed in state.deletion_lists if listed.reason == Reason.DIVERGED]
        pending = state.pending_deletions.items()
        hidden = Hidden(
            [(history, read_hidden(self._store, history)) for history in state.log_histories],
            {key: entry for key, entry in pending if entry.reason == Reason.DIVERGED},
            {listed: read_list(self._store, listed) for listed in lists},
        )
        start = self._start_of(state, target.cursor.phys, target)
        history = return_to(state, target, hidden, self._store, start, self._history_pages(state))
        return self._begin(history, start)

    def _history(self, state: CatalogState, common: CatalogState | None, phys: int, **more: Any) -> Built:
        """The begin of a log history as the commit after ``state``. ``more``: fields of its Divergence. What is put has
        new keys at each try."""

        def begun() -> Built:
            """One try: puts the pages of the log history, and returns the commit that names them."""
            start = replace(self._start_of(state, phys, common), **more)
            return self._begin(begin_history(state, start, self._history_pages(state)), start)

        return self._retry.call(begun)

    def _history_pages(self, state: CatalogState) -> HistoryPages:
        """What the begin of a log history needs to read, put and divide pages."""
        return HistoryPages(
            self._pages.index, self._pages.put_runs(state), self._limits.page_runs_max, RunCuts(self._store)
        )

    def _start_of(self, state: CatalogState, phys: int, common: CatalogState | None) -> Divergence:
        """The divergence after ``state`` at the commitlog offset ``phys``, from the state ``common``, with new keys for
        the objects that its log history puts."""
        root_key, hidden_key = (
            self._pages.new_key(kind, state.version + 1, state.epoch) for kind in ("history", "hidden")
        )
        return Divergence(phys, common, root_key, hidden_key, self._clock.wall_ms())

    def _begin(self, history: NewHistory, start: Divergence) -> Built:
        """Put the root page of a new log history and the state of what it hides, and return the commit that names
        them. Raises what the store raises."""
        self._pages.put(start.hidden_key, [encode_root(history.hidden)])
        self._pages.put(start.root_key, [encode_root(history.state)])
        draft = CommitDraft(
            CommitKind.LOG_HISTORY,
            history=history.state.cursor.history,
            from_phys=start.phys,
            to_phys=start.phys,
            check=history.state.cursor.check,
            created_ms=start.now_ms,
            common_version=0 if start.common is None else start.common.version,
            pages=PageChange(root=history.state.root),
        )
        return draft, history


def _name(owner: Owner | None) -> str:
    return (
        "no owner" if owner is None else f"{owner.kind} {owner.instance} on {owner.host or 'an unknown host'}"
    )
