"""Queue locks of orderly consumers, one client of a group per queue; and queues as clients name them.

A lock lasts 60 seconds from its last renewal; clients renew it every 20 seconds and trust it for 30. Only the owner of
the groups grants locks. One that releases them hands its locks over: the next owner then grants others at once. Reply
bodies with maps whose keys are queues are in fastjson's dialect, which all its versions read:
``{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:{…}}}``. Source:
org.apache.rocketmq.broker.client.rebalance.RebalanceLockManager.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from rocketmq_tiered.server.groups.group_offsets import ACCOUNT_PART, GROUP_PART
from rocketmq_tiered.server.groups.group_state import HeldLock
from rocketmq_tiered.server.wire.request import (
    NAME_CHARS_MAX,
    BadRequestError,
    HandlerTable,
    Request,
    Response,
    json_response,
)
from tiered.clock import Clock
from tiered.remoting.command import RequestCode, ResponseCode

LOCK_S = 60.0
TRUST_S = 30.0
"""REBALANCE_LOCK_MAX_LIVE_TIME of clients."""
BYTES_MAX = 16 * 1024 * 1024
LOCK_BYTES = 560
"""Measured memory of a lock, without names."""


class MessageQueue(NamedTuple):
    """A queue as clients name it."""

    broker: str
    topic: str
    queue_id: int

    def document(self) -> dict[str, Any]:
        """Return the JSON object that RocketMQ's class MessageQueue is written as."""
        return {"brokerName": self.broker, "queueId": self.queue_id, "topic": self.topic}


class _Lock(NamedTuple):
    client_id: str
    until_s: float
    nbytes: int
    account: str


class LockTable:
    """Locks by group and queue."""

    def __init__(self, clock: Clock, *, bytes_max: int = BYTES_MAX) -> None:
        """``bytes_max``: memory of all locks; one group may have GROUP_PART of it, and one account ACCOUNT_PART."""
        self._clock = clock
        self._bytes_max = bytes_max
        self._locks: dict[tuple[str, MessageQueue], _Lock] = {}
        self._group_bytes: Counter[str] = Counter()
        self._account_bytes: Counter[str] = Counter()
        self.held_bytes = 0
        """Memory estimate."""

    def lock(
        self, group: str, client_id: str, queues: list[MessageQueue], account: str = "", for_s: float = LOCK_S
    ) -> list[MessageQueue]:
        """Lock ``queues`` for a client of an orderly group, for ``for_s``, and return those that it holds now: others
        are locked by another client. Raises BadRequestError if there is no memory for them, for all locks, those of the
        group or those of the ``account``."""
        if not self._has_room(group, client_id, queues, account):
            self.expire()
            if not self._has_room(group, client_id, queues, account):
                raise BadRequestError(
                    f"no queue is locked: {len(self._locks)} are locked already, and of the {self._bytes_max} bytes for"
                    " all locks this group or account has its share"
                )
        now_s = self._clock.monotonic_s()
        held = []
        for queue in queues:
            present = self._locks.get((group, queue))
            if present is None or present.client_id == client_id or present.until_s <= now_s:
                self._remove(group, queue)
                byte_count = _bytes_of(group, client_id, queue)
                self._locks[group, queue] = _Lock(client_id, now_s + for_s, byte_count, account)
                self._count(group, account, byte_count)
                held.append(queue)
        return held

    def _count(self, group: str, account: str, more_bytes: int) -> None:
        self.held_bytes += more_bytes
        for counter, name in ((self._group_bytes, group), (self._account_bytes, account)):
            counter[name] += more_bytes
            if not counter[name]:
                del counter[name]

    def _has_room(self, group: str, client_id: str, queues: list[MessageQueue], account: str) -> bool:
        """Return whether locks of ``queues`` for a client fit into the memory of all locks, and into the parts of it
        that one group and one account may have."""
        more_bytes = 0
        for queue in queues:
            present = self._locks.get((group, queue))
            more_bytes += _bytes_of(group, client_id, queue) - (0 if present is None else present.nbytes)
        return more_bytes <= 0 or (
            self.held_bytes + more_bytes <= self._bytes_max
            and self._group_bytes[group] + more_bytes <= self._bytes_max // GROUP_PART
            and (not account or self._account_bytes[account] + more_bytes <= self._bytes_max // ACCOUNT_PART)
        )

    def _remove(self, group: str, queue: MessageQueue) -> None:
        lock = self._locks.pop((group, queue), None)
        if lock is not None:
            self._count(group, lock.account, -lock.nbytes)

    def held(self) -> tuple[HeldLock, ...]:
        """All locks that have not expired, for the next owner of the groups."""
        self.expire()
        return tuple(HeldLock(group, *queue, lock.client_id) for (group, queue), lock in self._locks.items())

    def restore(self, locks: Iterable[HeldLock]) -> None:
        """Locks that the owner before handed over: clients trust them for TRUST_S at most."""
        for held in locks:
            queue = MessageQueue(held.broker, held.topic, held.queue_id)
            with suppress(BadRequestError):
                self.lock(held.group, held.client_id, [queue], for_s=TRUST_S)

    def unlock(self, group: str, client_id: str, queues: list[MessageQueue]) -> None:
        """Release those of ``queues`` that the client holds."""
        for queue in queues:
            lock = self._locks.get((group, queue))
            if lock is not None and lock.client_id == client_id:
                self._remove(group, queue)

    def expire(self) -> None:
        """Remove the locks that were not renewed in time, and count the memory of the others again."""
        now_s = self._clock.monotonic_s()
        kept = {key: lock for key, lock in self._locks.items() if lock.until_s > now_s}
        self._locks, self.held_bytes = kept, 0
        self._group_bytes, self._account_bytes = Counter(), Counter()
        for (group, _), lock in kept.items():
            self._count(group, lock.account, lock.nbytes)


def _bytes_of(group: str, client_id: str, queue: MessageQueue) -> int:
    return LOCK_BYTES + sum(map(sys.getsizeof, (group, client_id, queue.broker, queue.topic)))


def register_lock_handlers(
    table: HandlerTable,
    locks: LockTable,
    owns_groups: Callable[[], bool],
    has_queue: Callable[[MessageQueue], bool] = lambda _: True,
) -> None:
    """Enter into ``table`` the handlers of LOCK_BATCH_MQ and UNLOCK_BATCH_MQ. ``owns_groups``: whether this server
    certainly owns the consumer groups, else it grants no lock; ``has_queue``: whether a queue is one to be locked."""

    @table.register(RequestCode.LOCK_BATCH_MQ)
    async def lock(request: Request) -> Response:
        if not owns_groups():
            remark = "this server does not own the consumer groups of this archive"
            return Response(ResponseCode.NO_PERMISSION, remark=remark)
        group, client_id, queues = _lock_request(request)
        held = locks.lock(group, client_id, list(filter(has_queue, queues)), request.account)
        return json_response({"lockOKMQSet": [queue.document() for queue in held]})

    @table.register(RequestCode.UNLOCK_BATCH_MQ)
    async def unlock(request: Request) -> Response:
        locks.unlock(*_lock_request(request))
        return Response()


def _lock_request(request: Request) -> tuple[str, str, list[MessageQueue]]:
    """Return group, client id and queues of a request to lock or unlock. Raises BadRequestError if one is missing or a
    name too long."""
    document = request.document()
    try:
        queues = [
            MessageQueue(str(item["brokerName"]), str(item["topic"]), int(item["queueId"]))
            for item in document.get("mqSet") or []
        ]
        group, client_id = str(document["consumerGroup"]), str(document["clientId"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequestError(
            f"the body of the request has no consumerGroup, no clientId or no valid mqSet: {error}"
        ) from error
    names = group, client_id, *(name for queue in queues for name in queue[:2])
    if max(map(len, names)) > NAME_CHARS_MAX:
        raise BadRequestError(
            f"a group, client id, broker or topic in the body has more than {NAME_CHARS_MAX} characters"
        )
    return group, client_id, queues


def queue_map(table: Mapping[MessageQueue, Any], others: Mapping[str, Any] | None = None) -> bytes:
    """An object with the map ``offsetTable`` keyed by queues, and ``others``."""
    entries = ",".join(f"{quoted(queue.document())}:{quoted(value)}" for queue, value in table.items())
    rest = "".join(f",{quoted(key)}:{quoted(value)}" for key, value in (others or {}).items())
    return f'{{"offsetTable":{{{entries}}}{rest}}}'.encode()


def offsets_for(language: str, table: Mapping[MessageQueue, int]) -> bytes:
    """Reset offsets for a client of ``language``: C++ clients read a list."""
    if language != "CPP":
        return queue_map(table)
    rows = [{**queue.document(), "offset": offset} for queue, offset in table.items()]
    return quoted({"offsetTable": rows}).encode()


def quoted(value: Any) -> str:
    """``value`` as JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
