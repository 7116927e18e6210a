"""Takes a retired broker back: its groups continue where they are in the mount, before the broker is readable.

    withdraw it → its archive is no longer retired → claim the groups → commit their offsets to the broker →
    permission 6 → send it the retry messages that are not consumed

The claim fences the node that serves the groups: it releases them, or has not acknowledged anything since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from rocketmq_tiered.process.broker_control import PERM_READ_WRITE, BrokerControl
from rocketmq_tiered.process.detach import DetachStep
from rocketmq_tiered.sending.outgoing import OutgoingMessage, kept_properties
from rocketmq_tiered.server.groups.group_state import GENERATION_SHIFT, GroupLog, Offsets, load_snapshot
from rocketmq_tiered.server.mount.node_lease import BrokerName, lapsed_leases, withdraw_archive
from rocketmq_tiered.server.retries.retry_log import RETRY_PREFIX, RetryLog, RetryMessage, RetryState
from tiered.catalog.archives import Archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.retirement import retired_since
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.errors import FencedError, UnavailableError
from tiered.formats.record import decode_record
from tiered.object_store.interface import ObjectStore
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import ResponseCode

RELEASE_S: Final = 60.0
"""How long a node may take to release the groups."""
LOOK_S: Final = 1.0
PRODUCER: Final = "tiered-detach"


def needs_groups(archive: Archive, state: CatalogState) -> bool:
    """Whether the broker's groups are in a mount, or an earlier run stopped while it took them back."""
    found = load_snapshot(archive.store)
    was_stopped = found.owner_name == PRODUCER and not found.released
    return retired_since(state) is not None or bool(found.lease) or was_stopped


def take_back(
    root: ObjectStore,
    archive: Archive,
    client: BrokerClient,
    say: Callable[[DetachStep], None],
) -> None:
    """Take back the retired broker at ``client``, whose permission is 0. Resumable: offsets are only raised."""
    broker = BrokerControl(client, archive.cluster)
    if broker.permission() == PERM_READ_WRITE and load_snapshot(archive.store).owner_name != PRODUCER:
        raise UnavailableError(
            "the broker is readable already: its groups repeat what they consumed from the mount",
            hint="set brokerPermission = 0, restart it, and run tiered detach --undo again",
        )
    withdraw_archive(root, BrokerName(archive.cluster, archive.broker))
    if retired_since(load(archive.store)) is not None:
        _end_retirement(archive)
    say(DetachStep("mount", "done: no longer announced"))
    log = GroupLog(archive.store, PRODUCER, MACHINE_CLOCK, has_lapsed=lapsed_leases(root))
    _claim(log)
    say(DetachStep("groups", "done: released by the node that served them"))
    count = _commit(broker, log.offsets)
    say(DetachStep("offsets", f"done: {count} written to the broker"))
    broker.set_permission(PERM_READ_WRITE)
    say(DetachStep("permission", "done: clients may read and write again (brokerPermission = 6)"))
    retries = RetryLog(archive.store, PRODUCER)
    sent = _send(client, _unconsumed(retries.claim(), log.offsets))
    # The next mount begins with what the broker then has.
    retries.write(RetryState().base(retries.version + 1, retries.owner, PRODUCER))
    log.write({}, released=True)
    say(DetachStep("retries", f"done: {sent} retry messages sent to the broker"))


def _end_retirement(archive: Archive) -> None:
    """Commit a claim of another writer: an archive that has had a writer since is no longer that of a retired
    broker."""
    writer = CatalogWriter(
        archive.store,
        cluster=archive.cluster,
        broker=archive.broker,
        instance=PRODUCER,
        kind="backfill",
        clock=MACHINE_CLOCK,
    )
    writer.claim()
    writer.release()


def _claim(log: GroupLog) -> None:
    """Claim the groups once the node that serves them has released them; take them from one that does not."""
    ends_s = time.monotonic() + RELEASE_S
    while time.monotonic() < ends_s:
        try:
            log.claim(0)
            return
        except FencedError:
            time.sleep(LOOK_S)
    log.claim(0, take_over=True)


def _commit(broker: BrokerControl, offsets: Offsets) -> int:
    """Commit the mount's offsets to the broker where they are ahead of its own, and count them."""
    before, count = broker.group_offsets(), 0
    for (group, topic), queues in sorted(offsets.items()):
        known = before.get(f"{topic}@{group}", {})
        newest: dict[int, tuple[int, int]] = {}
        for number, offset in queues.items():
            queue_id, generation = number & ((1 << GENERATION_SHIFT) - 1), number >> GENERATION_SHIFT
            newest[queue_id] = max(newest.get(queue_id, (-1, 0)), (generation, offset))
        for queue_id, (_, offset) in sorted(newest.items()):
            wanted = min(offset, broker.max_offset(topic, queue_id))
            if wanted > known.get(queue_id, -1):
                broker.commit(group, topic, queue_id, wanted)
                count += 1
    return count


def _unconsumed(state: RetryState, offsets: Offsets) -> Iterable[RetryMessage]:
    """The retry messages in order that their groups have not consumed in the mount."""
    for message in sorted(state.messages.values(), key=lambda message: message.number):
        group = message.topic.removeprefix(RETRY_PREFIX)
        if group == message.topic:
            continue  # a dead letter: it stays in the archive
        done = offsets.get((group, message.topic), {}).get(0, 0)
        if message.queue_offset < 0 or message.queue_offset >= done:
            yield message


def _send(client: BrokerClient, messages: Iterable[RetryMessage]) -> int:
    """Send retry messages to the broker as new messages of their retry topics, and count them."""
    sent = 0
    for message in messages:
        record = decode_record(message.data)
        outgoing = OutgoingMessage(
            message.topic,
            record.stored_body,
            kept_properties(record.properties, message.topic),
            0,
            record.flag,
            record.born_timestamp,
        )
        request = outgoing.request(PRODUCER, 0)
        answer = client.call(request.code, request.ext_fields, request.body)
        if answer.code != ResponseCode.SUCCESS:
            raise UnavailableError(f"the broker refuses a retry message: {answer.remark or answer.code}")
        sent += 1
    return sent
