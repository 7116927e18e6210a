"""The start of a writer: loads the catalog, compares the log with the archive, claims the epoch.

    load the catalog → compare the log with the archive → claim the epoch (backfill: before the first upload)

Owns that order, and claims an epoch only once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from tiered.archive.found_objects import objects_at_end
from tiered.broker_store.store import BrokerStore
from tiered.catalog.catalog_reader import history_spans, load, newest_log_check, shared_version, spans_to
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitInvalidError
from tiered.catalog.holdings import REPAIR_HINT, without_commits
from tiered.catalog.restored_check import NOT_RESTORED, restored_check
from tiered.catalog.state import CatalogState
from tiered.console import counted
from tiered.errors import (
    ArchiveDamagedError,
    FencedError,
    LogDivergedError,
    NoArchiveError,
    UnavailableError,
)
from tiered.kernels.queue_table import QueueTable
from tiered.model.tables import QUEUE_HIDDEN
from tiered.object_store.interface import ObjectStore
from uploader.log_divergence import (
    Check,
    CheckResult,
    CommonEnd,
    compare_log,
    ends_before,
    find_divergence,
    log_end,
)
from uploader.log_evidence import Commits, archived_end, common_records, log_head
from uploader.log_rule import LogDecision, LogFacts, LogLimits, LogStep, Shared, decide_log, misfit, recreated
from uploader.offload_status import Environment, OffloadIdentity
from uploader.queue_tails import QueueTails

logger = logging.getLogger(__name__)


class ArchiveOwner:
    """The ownership of one archive by one writer. ``claim`` from any thread."""

    def __init__(
        self,
        archive: ObjectStore,
        store: BrokerStore,
        identity: OffloadIdentity,
        environment: Environment,
        *,
        root_every: int,
        take_over: bool,
        limits: LogLimits,
        reported_end_phys: Callable[[], int | None],
        background: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """``take_over``: the archive may be taken from an owner that has not released it; ``limits``: what the operator
        allows a log that differs from the archive. ``reported_end_phys`` returns the end of the log that a live broker
        reports, or None. ``background`` runs merges of catalog pages."""
        self._limits = limits
        self._store = store
        self._reported_end_phys = reported_end_phys
        self._archive = archive
        self._log = store.commit_log
        self._environment = environment
        self._instance = identity.instance
        self._take_over = take_over
        self._has_claimed = self._has_prepared = False
        self._restored = NOT_RESTORED
        """The checksums of a store that `tiered restore` wrote, which replace those of the archive."""
        self.is_claim_settled = False
        """Whether a claim was won or refused; not after one that the store did not answer."""
        self._has_planned = False
        """Whether cycles are planned from the state that was loaded before a claim."""
        self.writer = CatalogWriter(
            archive,
            cluster=identity.cluster,
            broker=identity.broker,
            instance=identity.instance,
            kind=identity.kind,
            host=os.uname().nodename,
            clock=environment.clock,
            root_every=root_every,
            background=background,
        )

    def open(self, *, claim_now: bool) -> int:
        """Load the catalog, compare the broker's log with the archive, and return the commitlog offset from which this
        writer continues. ``claim_now``: become the archive's writer at once; otherwise only if a log history must be
        started.

        Raises LogDivergedError if the log does not continue the archive, FencedError if another writer owns it, and
        what reading raises."""
        self._log.refresh()
        state = self.writer.load()
        if self.writer.state.version:
            self._environment.archive_exists()
            self._restored = restored_check(self._store.path, self._archive)
        else:
            self._refuse_objects()
            self._environment.refuse_empty()
        comparison = None if state is None else self._compared(state)
        if claim_now:
            self._decide_take_over(self.writer.state, comparison)
        if state is not None and comparison is not None and comparison.decision.step is LogStep.CONTINUE:
            self._look_beyond_end(state)
        if claim_now:
            self.claim()
            before, state = state, self.writer.state_or_none
            if state is not None and (before is None or before.cursor != state.cursor):
                comparison = self._compared(state)  # the previous owner committed until the claim was won
        if state is None or comparison is None:
            return self._log.min_phys
        if comparison.decision.step is LogStep.STOP:
            raise comparison.error()
        if comparison.decision.step is LogStep.CONTINUE:
            return state.cursor.phys
        self.claim()
        if comparison.decision.step is LogStep.RETURN:
            with suppress(CommitInvalidError):
                return self._return_to(comparison.divergence)
            # Messages of the earlier log history are deleted: the log is archived from where it diverged.
            comparison = self._compared(state, may_return=False)
            if comparison.decision.step is LogStep.STOP:
                raise comparison.error()
        return self._start_history(comparison.divergence)

    def _refuse_objects(self) -> None:
        """Raises CatalogLostError or UnsupportedFormatError if objects are where an archive is to begin."""
        error = without_commits(self._archive)
        if not isinstance(error, NoArchiveError):
            raise error

    def _look_beyond_end(self, state: CatalogState) -> None:
        """Before a claim, look for objects that begin where the archive of ``state`` ends and that no commit names: its
        newest commit may be missing. Raises ArchiveDamagedError if the broker's log no longer has their messages;
        otherwise warns that these are archived again."""
        owner = state.owner
        if owner and not (owner.released or owner.instance == self._instance or self._take_over):
            return  # they are uploads of a running writer
        is_lost = self._log.min_phys > state.cursor.phys
        objects = objects_at_end(self._archive, state, all_queues=is_lost)
        messages = counted(sum(one.messages for one in objects), "message")
        if objects and is_lost:
            raise ArchiveDamagedError(
                f"the newest commit of {self._archive.url} may be missing: no commit names {messages} in "
                f"{counted(len(objects), 'object')}, such as {objects[0].key}, which begins where the archive ends, "
                "and the broker's log no longer has these messages",
                hint=REPAIR_HINT,
            )
        if objects:
            logger.warning(
                "%s of unfinished uploads, or of a missing newest commit, are archived again from the broker's log",
                messages,
                extra={"object": objects[0].key},
            )

    def _decide_take_over(self, owned: CatalogState, comparison: LogComparison | None) -> None:
        """Decide, before a claim, whether the archive may be taken from an owner that has not released it: only with a
        log that continues the archive. ``owned``: the state that names the owner; ``comparison``: of the log with the
        archive, None if that has no messages.

        Raises LogDivergedError if a claim would only fail, or be refused, each time this process starts."""
        owner = owned.owner
        if owner is None or owner.released or owner.instance == self._instance:
            if comparison is not None and comparison.decision.step is LogStep.STOP:
                raise comparison.error()
            return
        if comparison is None or comparison.decision.step is LogStep.CONTINUE:
            if not self._take_over:
                self._take_over = self._environment.may_take_over(owned, self._reported_end_phys())
            return
        self._environment.may_take_over(owned, None)  # called only because it also reports the lag
        if self._take_over:
            if comparison.decision.step is LogStep.STOP:
                raise comparison.error()
            return
        name = f"{owner.instance} on {owner.host}"
        if comparison.decision.is_foreign:
            hint = "give this broker a name of its own, or its archive another archive.url"
            raise comparison.error(f"another broker of this name owns the archive (writer {name}): ", hint)
        if not self._ends_below(owned, comparison.divergence):
            hint = "stop the broker that is not the master; if that is the other one, start this one with --take-over"
            raise comparison.error(f"another writer owns the archive (writer {name}): ", hint)

    def _ends_below(self, state: CatalogState, divergence: CommonEnd) -> bool:
        """Whether the log, as that of a slave that lags, only ends before the archive does."""
        end_phys = self._reported_end_phys()
        if end_phys is None:
            return ends_before(self._log, state.cursor.check, divergence.phys)
        return end_phys < state.cursor.phys

    def _compared(self, state: CatalogState, *, may_return: bool = True) -> LogComparison:
        """Compare the broker's log with the archive of ``state``: what they share, and whether archiving continues,
        starts a log history or stops. ``may_return``: whether an earlier log history may become current again, if the
        log is that one. Reads the log, catalog versions and objects."""
        reported_end_phys = self._reported_end_phys()
        check = self._restored.of(state.cursor.check)
        result = compare_log(self._log, check, reported_end_phys, to_phys=state.cursor.phys)
        divergence = CommonEnd(state.version, state.cursor.phys, result is CheckResult.SAME)
        shared, common = Shared.END, state
        if result is CheckResult.DELETED:
            shared = Shared.END_DELETED
        elif result is CheckResult.DIFFERENT:
            divergence = find_divergence(
                self._log, history_spans(state), self._newest_check, reported_end_phys
            )
            divergence = self._inside_next_commit(state, divergence)
            shared = Shared.EARLIER if divergence.is_compared else Shared.EARLIER_DELETED
            if not divergence.version:
                shared = Shared.NOTHING
        # At the begin of a log history the archive has no bytes to compare that an earlier history does not have too.
        has_grown = not state.log_histories or state.cursor.phys > state.log_histories[-1].begin_phys
        is_proven = shared is Shared.END and has_grown
        if (
            may_return
            and not is_proven
            and (earlier := self._end_of_earlier_history(state, divergence, shared)) is not None
        ):
            return LogComparison(
                earlier, decide_log(LogFacts(Shared.EARLIER_HISTORY), self._limits), state, None
            )
        if shared in (Shared.EARLIER, Shared.EARLIER_DELETED):
            common = load(self._archive, version=divergence.version)
        is_deleted = shared in (Shared.END_DELETED, Shared.EARLIER_DELETED)
        archived = archived_end(common)
        head = log_head(self._store, archived) if is_deleted else None
        facts = LogFacts(
            shared,
            "" if head is None else misfit(archived, head),
            state.cursor.phys - divergence.phys,
            shared is Shared.EARLIER
            and self._limits.truncate_max_bytes is None
            and ends_before(self._log, check, divergence.phys),
        )
        decision = decide_log(facts, self._limits)
        if not decision.is_foreign:
            return LogComparison(divergence, decision, state, common)
        ended = None if head is None else hidden_messages(state, common, recreated(archived, head))
        return LogComparison(CommonEnd(0, self._log.min_phys), decision, state, None, ended)

    def _inside_next_commit(self, state: CatalogState, found: CommonEnd) -> CommonEnd:
        """Where log and archive diverge: inside the commit that follows the common end ``found``, if they have records
        of that commit in common, otherwise at ``found``. Reads objects that ``state`` names."""
        if found.above is None or found.above[0] == 1:
            return found  # no commit follows, or it is the claim
        version, end_phys = found.above
        begin_phys = found.phys if found.version else 0
        commits = Commits(begin_phys, end_phys, (found.version + 1, version))
        log_end_phys = log_end(self._log, self._reported_end_phys())
        records = common_records(self._log, log_end_phys, self._archive, state, commits)
        if records is None:
            return found
        # A log history may have begun above the last common record.
        first, _ = history_spans(state)[-1]
        for common in filter(None, (version - 1, found.version, first if first == 1 else 0)):
            if load(self._archive, version=common).cursor.phys <= records.end_phys:
                return CommonEnd(common, records.end_phys, True, found.above, records.check, records.count)
        return found

    def note_planning(self) -> None:
        """Note that cycles are planned from the state that was loaded: a later claim must find it unchanged."""
        self._has_planned = True

    def claim(self) -> None:
        """Become the archive's only writer, unless this one is it. Raises FencedError if another writer owns it, and
        also if one took it over from this one: what this process has planned since is outdated. Raises UnavailableError
        if another writer committed before the claim."""
        if not self.writer.is_claimed:
            self._claim_epoch()
        if not self._has_prepared:
            self._environment.claimed()
            self._has_prepared = True

    def _claim_epoch(self) -> None:
        """Begin an epoch: make this writer the archive's owner by a commit. Raises FencedError if another writer owns
        the archive, or has claimed it since, and UnavailableError if another committed messages just before: what was
        planned for the earlier end must be planned again."""
        if self._has_claimed:
            raise FencedError(
                f"another writer has claimed the archive {self._archive.url}",
                hint="this writer stops archiving; reads of the archive continue",
            )
        before = self.writer.state_or_none
        try:
            self.writer.claim(take_over=self._take_over)
        except FencedError:
            self.is_claim_settled = True
            raise
        self._has_claimed = self.is_claim_settled = True
        self._environment.archive_exists()
        logger.info("epoch claimed", extra={"epoch": self.writer.state.epoch})
        after = self.writer.state_or_none
        if self._has_planned and after is not None and (before is None or before.cursor != after.cursor):
            raise UnavailableError(
                f"another writer committed to {self._archive.url} just before this one claimed it",
                hint="start the command again",
            )

    def load_tails(self, table: QueueTable, tails: QueueTails) -> None:
        """Set ``tails``, by the queue's number in ``table``, to where each queue ends in the archive."""
        tails.clear()
        state = self.writer.state_or_none
        if state is None:
            return
        for key, row in state.current_queues():
            tails.set(table.ordinal(key.topic, key.queue_id), key.generation, row)

    def _end_of_earlier_history(
        self, state: CatalogState, present: CommonEnd, shared: Shared
    ) -> CommonEnd | None:
        """Where the log stops agreeing with an earlier log history (what the archive had before a truncated or replaced
        log), if it agrees with that further than with the current one, which it shares up to ``present``; else None."""
        reported_end_phys = self._reported_end_phys()
        is_known = shared in (Shared.END, Shared.EARLIER) and present.is_compared
        best, phys = None, present.phys if is_known else -1
        for history in state.log_histories:
            last_version = history.version - 1
            common = shared_version(state.log_histories, last_version, state.version)
            # Only versions that the current history does not have.
            spans = [
                (max(first, common + 1), last)
                for first, last in spans_to(state.log_histories, last_version)
                if last > common
            ]
            end = find_divergence(self._log, spans, self._newest_check, reported_end_phys)
            if end.version and end.is_compared and end.phys > phys:
                best, phys = end, end.phys
        return best

    def _newest_check(self, first: int, last: int) -> Check | None:
        """The newest commit of the catalog versions ``first`` to ``last`` that archived a part of the log: its version,
        the checksum that the log must have there, and its end; None: there is none."""
        check = newest_log_check(self._archive, first, last)
        return None if check is None else (check[0], self._restored.of(check[1]), check[2])

    def _return_to(self, divergence: CommonEnd) -> int:
        """Commit that the earlier log history which ends at ``divergence`` is current again, and return the commitlog
        offset at which reading continues. Raises CommitInvalidError if messages of that history are deleted."""
        before = self.writer.state.cursor.history
        self.writer.return_to(divergence.version)
        logger.warning(
            "the broker's earlier log is back: its archived messages are visible again up to commitlog offset %d, "
            "without another upload; messages that only log history %d has are hidden",
            divergence.phys,
            before,
        )
        logger.info(
            "the broker's earlier log is back: a new log history continues it",
            extra={"from_phys": divergence.phys, "common_version": divergence.version},
        )
        return divergence.phys

    def _start_history(self, divergence: CommonEnd) -> int:
        """Commit that a new log history begins where the log diverged from the archive, and return that commitlog
        offset, at which reading begins. Raises UnavailableError if another commit came first: the next start compares
        again."""
        before = self.writer.state
        above_version = divergence.above[0] if divergence.check and divergence.above else 0
        try:
            after = self.writer.append_history(
                common_version=divergence.version,
                phys=divergence.phys,
                check=divergence.check,
                above_version=above_version,
            )
        except CommitInvalidError as error:
            raise UnavailableError(error.message, hint=error.hint) from error
        lost_bytes = max(0, before.cursor.phys - divergence.phys) if divergence.version else 0
        logger.error(
            "the broker's log diverged from the archive at commitlog offset %d: %s of log history %d are hidden; "
            "tiered ls --histories lists them",
            divergence.phys,
            counted(after.log_histories[-1].hidden_messages, "archived message"),
            before.cursor.history,
        )
        logger.info(
            "the broker's commitlog was truncated or replaced: archiving continues in a new log history",
            extra={
                "from_phys": divergence.phys,
                "common_version": divergence.version,
                "superseded_bytes": lost_bytes,
            },
        )
        return divergence.phys


_PUT_BACK = (
    "put the broker's log back, or give another broker a name of its own with --broker; if this log is right, set "
    "archive.replace_log (backfill: --replace-log): tiered ls --histories lists what it hides"
)


@dataclass(frozen=True)
class LogComparison:
    """A comparison of a log with the archive of ``state``, and the decision that follows. ``divergence``: up to where
    they agree; ``common``: the state up to which they do, or None. ``hidden_if_same``: how many messages would be
    hidden if the operator sets archive.same_broker; None if that setting would not help."""

    divergence: CommonEnd
    decision: LogDecision
    state: CatalogState
    common: CatalogState | None
    hidden_if_same: int | None = None

    def error(self, subject: str = "", hint: str = _PUT_BACK) -> LogDivergedError:
        """The error of a writer that stops: why the log does not continue the archive, and how many messages continuing
        would hide. ``subject`` comes first in the text; ``hint`` says what to do."""
        diverged = (
            f"diverged from the archive at commitlog offset {self.divergence.phys}"
            if self.common is not None
            else ""
        )
        why = self.decision.why or diverged or "shares nothing with the archive"
        lost = hidden_messages(self.state, self.common) - self.divergence.records
        hidden = counted(max(0, lost), "archived message")
        if self.hidden_if_same is not None and hint is _PUT_BACK:
            hint = (
                "if the log is the same broker's (topics recreated, or another address, while nothing was archived), "
                f"archive.same_broker (backfill: --same-broker) continues, and hides {self.hidden_if_same:,} of "
                f"recreated topics; else {hint}"
            )
        return LogDivergedError(
            f"{subject}the broker's log {why}; continuing with it would hide {hidden}", hint=hint
        )


def hidden_messages(
    state: CatalogState, common: CatalogState | None, ended: Collection[tuple[str, int]] = ()
) -> int:
    """How many visible messages of ``state``, counted by offsets, a new log history would hide that continues the
    earlier state ``common``: those that it does not have, and all of the queues ``ended`` (topic, queue id)."""
    count = 0
    for key, row in state.queues():
        if row["flags"] & QUEUE_HIDDEN:
            continue
        common_row = None if common is None or (key.topic, key.queue_id) in ended else common.queue(key)
        begin = int(row["min_queue_offset"])
        if common_row is not None:
            begin = max(begin, int(common_row["end_queue_offset"]))
        count += max(0, int(row["end_queue_offset"]) - begin)
    return count
