"""Takes a retired broker back: its groups continue where they are in the mount, before the broker is readable.

    withdraw it → its archive is no longer retired → claim the groups → commit their offsets to the broker →
    permission 6 → send it the retry messages that are not consumed

The claim fences the node that serves the groups: it releases them, or has not acknowledged anything since.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final

from rocketmq_tiered.process.broker_control import PERM_READ_WRITE, BrokerControl
from rocketmq_tiered.process.detach import DetachStep
from rocketmq_tiered.sending.outgoing import OutgoingMessage, kept_properties
from rocketmq_tiered.server.groups.group_state import GENERATION_SHIFT, GroupLog, Offsets, load_snapshot
from rocketmq_tiered.server.mount.node_lease import BrokerName, lapsed_leases, withdraw_archive
from rocketmq_tiered.server.retries.retry_log import RetryLog, RetryMessage, RetryState
from tiered.catalog.archives import Archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.retirement import retired_since
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.errors import FencedError, UnavailableError
from tiered.formats.record import decode_record
from tiered.model.queue import RETRY_PREFIX
from tiered.object_store.interface import ObjectStore
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import ResponseCode

RELEASE_S: Final = 60.0
"""How long a node may take to release the groups."""
LOOK_S: Final = 1.0
DETACH_NAME: Final = "tiered-detach"
"""The name under which this command owns groups, writes commits and sends messages."""


def needs_groups(archive: Archive, state: CatalogState) -> bool:
    """Whether the broker's groups are in a mount, or an earlier run stopped while it took them back."""
    found = load_snapshot(archive.store)
    was_stopped = found.owner_name == DETACH_NAME and not found.released
    return retired_since(state) is not None or bool(found.lease) or was_stopped


def take_back(
    root: ObjectStore,
    archive: Archive,
    client: BrokerClient,
    say: Callable[[DetachStep], None],
) -> None:
    """Put the retired broker that ``client`` is connected to back into service, after it was started with permission 0:
    it is no longer mounted, its consumer groups continue where they were in the mount, and it gets the retry messages
    that they have not consumed. ``say`` prints each step. After a failure it may be called again, as offsets are only
    raised."""
    broker = BrokerControl(client, archive.cluster)
    # Where this command owns the groups already, an earlier run of it has made the broker readable.
    if broker.permission() == PERM_READ_WRITE and load_snapshot(archive.store).owner_name != DETACH_NAME:
        raise UnavailableError(
            f"broker {archive.broker} is readable already: its groups would repeat what they consumed in the mount",
            hint="set brokerPermission = 0 in broker.conf, restart the broker, and run tiered detach --undo again",
        )
    withdraw_archive(root, BrokerName(archive.cluster, archive.broker))
    if retired_since(load(archive.store)) is not None:
        _end_retirement(archive)
    say(DetachStep("mount", "done: nodes of tiered mount are not to serve the broker any more"))
    log = GroupLog(archive.store, DETACH_NAME, MACHINE_CLOCK, has_lapsed=lapsed_leases(root))
    _claim(log)
    say(DetachStep("groups", "done: the node of tiered mount has released the consumer groups"))
    count = _commit(broker, log.offsets)
    say(DetachStep("offsets", f"done: {count} offsets of consumer groups written to the broker"))
    broker.set_permission(PERM_READ_WRITE)
    say(DetachStep("permission", "done: clients may read and write again (brokerPermission = 6)"))
    retries = RetryLog(archive.store, DETACH_NAME)
    sent = _send(client, _unconsumed(retries.claim(), log.offsets))
    # A later mount begins with what the broker then has, so the offsets and retry messages of this mount are cleared.
    retries.write(RetryState().base(retries.version + 1, retries.owner, DETACH_NAME))
    log.write({}, released=True)
    say(DetachStep("retries", f"done: {sent} retry messages sent to the broker"))


def _end_retirement(archive: Archive) -> None:
    """Become the archive's writer for a moment: an archive that has had a writer since the broker retired is no longer
    that of a retired broker."""
    writer = CatalogWriter(
        archive.store,
        cluster=archive.cluster,
        broker=archive.broker,
        instance=DETACH_NAME,
        kind="backfill",
        clock=MACHINE_CLOCK,
    )
    writer.claim()
    writer.release()


def _claim(log: GroupLog) -> None:
    """Become the owner of the consumer groups' offsets once the node of `tiered mount` that serves them has released
    them. After a minute they are taken from a node that has not."""
    ends_s = time.monotonic() + RELEASE_S
    while time.monotonic() < ends_s:
        try:
            log.claim(0)
            return
        except FencedError:
            time.sleep(LOOK_S)
    log.claim(0, take_over=True)


def _commit(broker: BrokerControl, offsets: Offsets) -> int:
    """Commit ``offsets``, which the groups reached in the mount, to the broker where they are higher than its own.
    Returns how many were committed. A topic that was deleted and created again has queues of several generations in the
    archive: only the newest is at the broker."""
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
    """The messages of ``state``, in the order in which they came, that were to be delivered again to groups which have
    not consumed them in the mount. ``offsets``: those of the groups there."""
    for message in sorted(state.messages.values(), key=lambda message: message.number):
        group = message.topic.removeprefix(RETRY_PREFIX)
        if group == message.topic:
            continue  # a dead letter: it stays in the archive
        consumed = offsets.get((group, message.topic), {}).get(0, 0)
        if message.queue_offset < 0 or message.queue_offset >= consumed:  # -1 while its delay lasts
            yield message


def _send(client: BrokerClient, messages: Iterable[RetryMessage]) -> int:
    """Send each of ``messages`` to the broker as a new message of its retry topic, and return how many there were.
    Raises UnavailableError if the broker refuses one."""
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
        request = outgoing.request(DETACH_NAME, 0)
        answer = client.call(request.code, request.ext_fields, request.body)
        if answer.code != ResponseCode.SUCCESS:
            raise UnavailableError(
                f"the broker refuses a message of {message.topic}, which is to be delivered again: "
                f"{answer.remark or answer.code}",
                hint="correct the cause and run tiered detach --undo again",
            )
        sent += 1
    return sent
