"""The start of a writer: loads the catalog, compares the log with the archive, claims the epoch.

    load the catalog → compare the log with the archive → claim the epoch (backfill: before the first upload)

Owns that order, and claims an epoch only once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import history_spans, newest_log_check
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.state import CatalogState
from tiered.errors import FencedError, UnavailableError
from tiered.kernels.queue_table import QueueTable
from tiered.object_store.interface import ObjectStore
from uploader.common_rows import CommonRowsWriter
from uploader.log_divergence import (
    CheckResult,
    Divergence,
    compare,
    ends_before,
    find_divergence,
    require_shared,
)
from uploader.offload_environment import Environment, OffloadIdentity
from uploader.queue_tails import QueueTails

logger = logging.getLogger(__name__)


class ArchiveOwner:
    """The ownership of one archive by one writer. ``claim`` from any thread."""

    def __init__(
        self,
        archive: ObjectStore,
        log: CommitLog,
        identity: OffloadIdentity,
        environment: Environment,
        *,
        root_every: int,
        take_over: bool,
        supersedes_max_bytes: float,
        reported_end_phys: Callable[[], int | None],
        background: Callable[[Callable[[], None]], object] | None = None,
        work_dir: str = "",
    ) -> None:
        """``supersedes_max_bytes``: how much of the archive's log a diverged log may supersede; 0: nothing by an older
        copy, nor by a log that shares nothing with the archive. ``reported_end_phys``:
        the end of log that a live broker reports, or None. ``background``: see CatalogWriter. ``work_dir``: see
        CommonRowsWriter."""
        self._supersedes_max_bytes = supersedes_max_bytes
        self._reported_end_phys = reported_end_phys
        self._archive = archive
        self._log = log
        self._environment = environment
        self._instance = identity.instance
        self._take_over = take_over
        self._has_claimed = False
        self.is_claim_settled = False
        """Whether a claim was won or refused; not after one that the store did not answer."""
        self._has_planned = False
        self._common_rows = CommonRowsWriter(
            archive, writer=identity.instance, clock_ms=environment.clock_ms, work_dir=work_dir
        )
        self.writer = CatalogWriter(
            archive,
            cluster=identity.cluster,
            broker=identity.broker,
            instance=identity.instance,
            kind=identity.kind,
            host=os.uname().nodename,
            clock_ms=environment.clock_ms,
            root_every=root_every,
            background=background,
        )

    def open(self, *, claim_now: bool) -> int:
        """The physical offset to continue from."""
        self._log.refresh()
        state = self.writer.load()
        if self.writer.state.version:
            self._environment.archive_exists()
        else:
            self._environment.refuse_empty()
        if claim_now:
            # The previous owner may commit until the claim is won: compare with the state after it.
            owned = self.writer.state
            if not self._take_over and owned.owner is not None and not owned.owner.released:
                self._take_over = self._environment.may_take_over(owned, self._reported_end_phys())
            if state is not None and self._is_own(owned):
                self._refuse_loss(state)  # a claim each retry would be a commit each retry
            self.claim()
            state = self.writer.state_or_none
        if state is None:
            return self._log.min_phys
        if self._differs(state):
            if not self.writer.is_claimed:
                self._refuse_loss(state)
                self.claim()
            return self._start_history(self._find_divergence(self._reported_end_phys()))
        return state.cursor.phys

    def _is_own(self, state: CatalogState) -> bool:
        owner = state.owner
        return owner is not None and (owner.released or owner.instance == self._instance)

    def _differs(self, state: CatalogState) -> bool:
        return compare(self._log, state.cursor.check, self._reported_end_phys()) == CheckResult.DIFFERENT

    def _refuse_loss(self, state: CatalogState) -> None:
        """Raises if the log differs from the archive of ``state`` and may not continue it."""
        if self._differs(state):
            self._find_divergence(self._reported_end_phys())

    def planning_begins(self) -> None:
        """Cycles are planned from this state: a later claim must find it unchanged."""
        self._has_planned = True

    def claim(self) -> None:
        """Claim the epoch. Only once: a writer that lost it has planned from outdated tails."""
        if self.writer.is_claimed:
            return
        if self._has_claimed:
            raise FencedError(
                "another writer has claimed the archive", hint="this writer stops; reads continue"
            )
        before = self.writer.state_or_none
        try:
            self.writer.claim(take_over=self._take_over)
        except FencedError:
            self.is_claim_settled = True
            raise
        self._has_claimed = self.is_claim_settled = True
        self._environment.archive_exists()
        self._environment.log("epoch claimed", {"epoch": self.writer.state.epoch})
        after = self.writer.state_or_none
        if self._has_planned and after is not None and (before is None or before.cursor != after.cursor):
            raise UnavailableError("another writer committed just before the claim", hint="run again")

    def load_tails(self, table: QueueTable, tails: QueueTails) -> None:
        """Every queue's current generation, from the catalog."""
        tails.clear()
        state = self.writer.state_or_none
        if state is None:
            return
        for key, row in state.current_queues():
            tails.set(
                table.ordinal(key.topic, key.queue_id),
                next_offset=int(row["end_queue_offset"]),
                end_byte=int(row["end_byte"]),
                end_phys=int(row["end_phys"]),
                generation=key.generation,
            )

    def _find_divergence(self, reported_end_phys: int | None) -> Divergence:
        newest = partial(newest_log_check, self._archive)
        found = find_divergence(self._log, history_spans(self.writer.state), newest, reported_end_phys)
        may_replace = self._supersedes_max_bytes > 0
        lost_bytes = self._lost_bytes(found)
        if may_replace and lost_bytes > self._supersedes_max_bytes:
            raise UnavailableError(
                f"the broker's log was truncated or replaced: it matches the archive up to {found.phys} only, and "
                f"{lost_bytes} bytes above are archived, more than archive.truncate_max_bytes "
                f"({self._supersedes_max_bytes})",
                hint="start the broker with its newer log, or set archive.replace_log to hide the archived messages "
                "that this log lacks",
            )
        may_be_older = found.version > 0 and not may_replace
        is_older_copy = may_be_older and ends_before(self._log, self.writer.state.cursor.check, found.phys)
        return require_shared(found, is_older_copy=is_older_copy, may_replace=may_replace)

    def _lost_bytes(self, found: Divergence) -> int:
        """Bytes of the archive's log that a history from ``found`` supersedes; none of a log that shares nothing: all
        messages stay, as an earlier generation."""
        return max(0, self.writer.state.cursor.phys - found.phys) if found.version else 0

    def _start_history(self, divergence: Divergence) -> int:
        lost_bytes = self._lost_bytes(divergence)
        try:
            self.writer.append_history(
                common_version=divergence.version, phys=divergence.phys, write_common=self._common_rows
            )
        except CommitInvalidError as error:
            raise UnavailableError(error.message, hint=error.hint) from error
        logger.error(
            "the broker's log diverged from the archive at %d: %d archived bytes are superseded, and kept for "
            "gc.diverged_grace_ms (version %d of the catalog has them)",
            divergence.phys,
            lost_bytes,
            self.writer.state.version - 1,
        )
        self._environment.log(
            "the broker's log diverged from the archive: new log history",
            {
                "from_phys": divergence.phys,
                "common_version": divergence.version,
                "superseded_bytes": lost_bytes,
            },
        )
        return divergence.phys
