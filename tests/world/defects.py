"""Planted defects: real functions made wrong, each of which some history must notice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

import rocketmq_tiered.maintenance.compaction_round as rounds
import uploader.cycle_builder
import uploader.offload
import uploader.queue_ttl_classes
from rocketmq_tiered.maintenance import expire, gc, key_rounds
from rocketmq_tiered.maintenance.expire_plan import ExpiryPlanner
from rocketmq_tiered.maintenance.repair import repair
from rocketmq_tiered.maintenance.restore.records import LogOrder
from rocketmq_tiered.message_table.batches import message_batches
from rocketmq_tiered.sending import timer_delivery
from rocketmq_tiered.sending.timer_broker import WHEEL_TOPIC, RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import TimerDelivery
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.mount.membership import Membership
from rocketmq_tiered.server.mount.node_lease import NodeLog
from tests.world import actors
from tests.world.broker_model import BATCHES
from tests.world.timer_defects import (
    by_key,
    changed_table,
    is_found,
    over_places,
    progress_before_the_send,
    with_time,
)
from tiered.archive import salvage
from tiered.broker_store import pins
from tiered.catalog import apply, log_histories
from tiered.catalog.broker_facts import TABLE_NAMES
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft
from tiered.catalog.commit_attempt import CommitAttempt
from tiered.catalog.deletions import Reason
from tiered.catalog.garbage import Grace, KeySet
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.pages import Bounds
from tiered.catalog.requirements import Requirements
from tiered.catalog.run_cuts import RunCuts
from tiered.errors import CorruptionError, UnavailableError
from tiered.formats import part_rows
from tiered.model.tables import QUEUE_HIDDEN
from uploader import index_builder, metadata_commits
from uploader.archive_owner import ArchiveOwner
from uploader.cycle import Attempt
from uploader.cycle_plan import CyclePlanner
from uploader.metadata_commits import DeletedTopics
from uploader.repeated_offsets import RepeatedOffsets

Change = Callable[[Any], Any]
"""Makes a wrong one of what is right."""


@dataclass(frozen=True)
class Defect:
    """``change`` of the attribute ``name`` of ``where``."""

    where: Any
    name: str
    change: Change

    @contextmanager
    def planted(self) -> Iterator[None]:
        with patch.object(self.where, self.name, self.change(getattr(self.where, self.name))):
            yield


def always(value: Any) -> Change:
    return lambda right: value


def drafts(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    return lambda right: lambda kind, **values: CommitDraft(kind, **change(values))


def sources_deleted(right: Any) -> Any:
    def run_round(store: Any, state: Any, planned: Any, *rest: Any, **more: Any) -> Any:
        result = right(store, state, planned, *rest, **more)
        if result is not None:
            store.delete([planned.candidates.object_keys[number] for number in planned.plan.sources.tolist()])
        return result

    return run_round


def kept_runs_forgotten(right: Any) -> Any:
    def put_pages(store: Any, state: Any, planned: Any, *rest: Any) -> Any:
        moved_only = replace(planned.candidates, runs=planned.candidates.runs[:0])
        return right(store, state, replace(planned, candidates=moved_only), *rest)

    return put_pages


def won_whatever_exists(right: Any) -> Any:
    def is_won(self: CommitAttempt, commit: Any, body: Any) -> bool:
        right(self, commit, body)
        return True

    return is_won


def begun_below(right: Any) -> Any:
    def begin(self: ArchiveOwner, **claim: Any) -> int:
        begin_phys: int = right(self, **claim)
        check = self.writer.state.cursor.check
        return check.begin_phys if check.end_phys == begin_phys else begin_phys

    return begin


def unapplied(right: Any) -> Any:
    def raised(state: Any, draft: Any) -> Any:
        table, gaps, chunks = right(state, draft)
        table["min_queue_offset"] = state.table["min_queue_offset"]
        return table, gaps, chunks

    return raised


def fallen(right: Any) -> Any:
    def restored(*values: Any) -> Any:
        table = right(*values)
        table["min_queue_offset"] = 0
        return table

    return restored


def one_further(right: Any) -> Any:
    return lambda self, page, limits, minimum, bounds=Bounds.PHYS: right(
        self, page, limits + 1, minimum, bounds
    )


def acknowledged_anyway(right: Any) -> Any:
    def write(self: GroupLog, offsets: Any, **released: bool) -> None:
        with suppress(UnavailableError):
            right(self, offsets, **released)

    return write


def counted_as_one(right: Any) -> Any:
    def rows(*values: Any) -> Any:
        found = right(*values)
        return replace(found, inner_num=np.ones_like(found.inner_num))

    return rows


def surveyed(column: str, mask: int) -> Change:
    """A survey in which a column of the table of queues has only the bits of ``mask``."""

    def of(right: Any) -> Any:
        def survey(store: Any) -> Any:
            found = right(store)
            table = found.state.table.copy()
            table[column] &= mask
            found.state, found.is_whole = replace(found.state, table=table), False
            found.notes.append("a defect")
            return found

        return survey

    return of


def closed_up(right: Any) -> Any:
    def rows(self: Any, begin: int, end: int) -> Any:
        found = right(self, begin, end)
        at = np.flatnonzero(self._is_sparse[found.part])
        found.queue_offset[at] = found.queue_offset[at[:1]] + np.arange(len(at))
        return found

    return rows


def with_files_only(right: Any) -> Any:
    def plan_pins(files: Any, pins: Any, *more: Any) -> Any:
        plan, there = right(files, pins, *more), {file.begin_phys for file in files}
        return replace(plan, release=tuple(pin for pin in pins if pin.begin_phys not in there))

    return plan_pins


def absent_is_deleted(right: Any) -> Any:
    def check(self: Any, table: Any, *rest: Any) -> Any:
        return replace(right(self, table, *rest), deleted=frozenset({BATCHES} - table))

    return check


def the_last_by_time(right: Any) -> Any:
    def entries_of(data: Any, starts: Any, *rest: Any) -> Any:
        found = right(data, starts, *rest)
        stored_ms = [int.from_bytes(data[at + 56 : at + 64].tobytes(), "big") for at in starts.tolist()]
        order = np.argsort(stored_ms, kind="stable")[::-1]
        return found[np.sort(order[np.unique(found["low"][order], return_index=True)[1]])]

    return entries_of


def trusted_without_a_reply(right: Any) -> Any:
    def renew(self: NodeLog, *values: Any) -> None:
        with suppress(UnavailableError):
            right(self, *values)

    return renew


def without_damaged(state: Any) -> Any:
    if state.damaged:
        raise CorruptionError("a table of the broker is damaged")
    return {name: getattr(state, name) for name in TABLE_NAMES}


DEFECTS: dict[str, Defect] = {
    "an offset that is used again begins a generation": Defect(
        RepeatedOffsets, "continued", always(lambda self, repeated: [])
    ),
    "a queue without files is deleted": Defect(
        metadata_commits,
        "without_units",
        lambda right: lambda archived, shown, _: right(archived, shown, {"-"}),
    ),
    "a damaged table takes others down": Defect(uploader.offload, "broker_tables", always(without_damaged)),
    "store times alone decide what expires": Defect(
        ExpiryPlanner, "_newest_ms", always(lambda self, runs: runs["max_store_timestamp"])
    ),
    "progress is committed before the send": Defect(TimerDelivery, "_hand_over", progress_before_the_send),
    "a cancellation after the plan is not seen": Defect(
        TimerDelivery,
        "_commit",
        lambda right: lambda self, state, claims, entries=None: right(self, state, claims),
    ),
    "a timer is known by its key": Defect(RemoteTimerBroker, "has", by_key),
    "entries in doubt are not searched": Defect(TimerDelivery, "_was_sent", always(lambda self, send: False)),
    "a time is rounded down": Defect(timer_delivery, "timer_send", with_time(lambda ms: ms // 1000 * 1000)),
    "searched while the other owner may send": Defect(
        TimerDelivery, "_is_settled", always(lambda self: self._broker.is_settled())
    ),
    "the wheel topic is not searched": Defect(
        RemoteTimerBroker, "_places_found", is_found(lambda topic: topic != WHEEL_TOPIC)
    ),
    "the real topic is not searched": Defect(
        RemoteTimerBroker, "_places_found", is_found(lambda topic: topic == WHEEL_TOPIC)
    ),
    "the broker is searched before it has dispatched": Defect(
        RemoteTimerBroker, "is_settled", always(lambda self: True)
    ),
    "searched while sends may still land": Defect(timer_delivery, "SETTLE_S", always(0.0)),
    "a place cancels all of its key": Defect(timer_delivery, "sort_out", changed_table(over_places)),
    "an entry of another history is sent": Defect(
        timer_delivery,
        "is_entry_of",
        always(lambda message, entry, _: message.record.physical_offset <= entry["physical_offset"]),
    ),
    "a repair lowers floors": Defect(repair, "survey", surveyed("min_queue_offset", 0)),
    "a repair shows hidden generations": Defect(repair, "survey", surveyed("flags", ~QUEUE_HIDDEN & 0xFF)),
    "a hole is served as data": Defect(part_rows._Window, "rows", closed_up),
    "a pin is released before its file is archived": Defect(pins, "plan_pins", with_files_only),
    "a restore skips its last object": Defect(
        LogOrder, "objects", lambda right: lambda self, window: iter([*right(self, window)][:-1])
    ),
    "an index covers too much": Defect(
        index_builder,
        "segments_of",
        lambda right: lambda page, first, last: right(page, first, last)[1:],
    ),
    "a topic that is absent is deleted": Defect(DeletedTopics, "check", absent_is_deleted),
    "what is read again begins a generation": Defect(
        CatalogWriter, "ends_below", always(lambda self, phys: {})
    ),
    "records of another log are saved": Defect(salvage, "_has_ended", always(lambda state, queue: False)),
    "a healed object replaces joined runs": Defect(
        MaintenanceCommit, "_compacted_since", always(lambda self, newest, version: "")
    ),
    "commit before data": Defect(Attempt, "is_durable", always(property(lambda self: True))),
    "put id not compared": Defect(CommitAttempt, "is_won", won_whatever_exists),
    "epoch not compared": Defect(CatalogWriter, "_owned", always(lambda self, state: state)),
    "a record that is read again is accepted": Defect(ArchiveOwner, "open", begun_below),
    "gc without grace": Defect(actors, "Grace", always(lambda *_: Grace(0, 0))),
    "gc ignores pages": Defect(gc, "referenced_by", always(lambda *_: KeySet(()))),
    "a floor is not applied": Defect(apply, "raise_floors", unapplied),
    "a floor falls": Defect(log_histories, "_restored", fallen),
    "a living object is a pending deletion": Defect(
        rounds, "CommitDraft", drafts(lambda values: values | {"restored": ()})
    ),
    "an abandoned key is used again": Defect(
        uploader.cycle_builder, "object_key", lambda right: lambda *place: right(*place[:3], 1)
    ),
    "a history is cut off by one": Defect(RunCuts, "divided", one_further),
    "a tombstone is kept too short": Defect(
        key_rounds,
        "divided",
        lambda right: lambda entries, **keeps: right(entries[entries["is_tombstone"] == 0], **keeps),
    ),
    "an object mixes TTL classes": Defect(uploader.queue_ttl_classes, "ttl_class", always(lambda ttl_ms: 0)),
    "a clock that is off expires": Defect(expire, "require_same_clock", always(lambda store, ms: ms)),
    "messages expire early": Defect(
        expire, "require_same_clock", lambda right: lambda *clocks: right(*clocks) + 50_000
    ),
    "timers are handed over too early": Defect(
        timer_delivery, "horizon_ms", lambda right: lambda now_ms, *ahead: right(now_ms + 120_000, *ahead)
    ),
    "the answer to a key is all": Defect(
        RemoteTimerBroker,
        "_places_found",
        always(lambda self, topic, send: {*self._places_with_key(topic, send.key)}),
    ),
    "a batch counts as one": Defect(CyclePlanner, "_admitted_rows", counted_as_one),
    "a commit is acknowledged before it is durable": Defect(GroupLog, "write", acknowledged_anyway),
    "a lock is kept after the lease": Defect(Membership, "holds", always(lambda self: True)),
    "a lease is trusted before it is durable": Defect(NodeLog, "renew", trusted_without_a_reply),
    "the latest view is by time": Defect(message_batches, "entries_of", the_last_by_time),
    "sources are deleted at once": Defect(rounds, "run_round", sources_deleted),
    "sources are left over": Defect(
        rounds,
        "CommitDraft",
        drafts(
            lambda values: (
                values | {"pending_deletions": ()} if values["reason"] == Reason.COMPACTED else values
            )
        ),
    ),
    "pages forget what was not moved": Defect(rounds, "_put_pages", kept_runs_forgotten),
    "changes since the plan are ignored": Defect(Requirements, "unmet", always(lambda self, state: "")),
}
