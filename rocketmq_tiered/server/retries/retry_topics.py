"""A backend that adds the topics growing here: retry and dead-letter topics, which continue archived queues, so that
consumers and tools see one queue; and the only writable topic, through which RocketMQ 5 proxies share their clients.
They do not start without it. Of that only the last messages are kept, in memory: proxies repeat theirs every ten
seconds.

Owns reading what was delivered into them. Sources: org.apache.rocketmq.proxy.service.sysmessage.HeartbeatSyncer,
SendMessageRequestHeaderV2.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fetcher.io.waiting import SLICE_S
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.tag_filter import tags_code
from rocketmq_tiered.server.backend.backend import Backend, Bounds, TopicConfig, Unit
from rocketmq_tiered.server.backend.route_handlers import PROXY_TOPIC, READ_ONLY
from rocketmq_tiered.server.groups.subscription_filter import CompiledFilters
from rocketmq_tiered.server.retries.retry_log import (
    PHYS_BASE,
    RetryMessage,
    RetryObject,
    RetryQueue,
    RetryState,
    assign_offsets,
    encode_record,
    host_bytes,
)
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from rocketmq_tiered.server.wire.turns import Turns, first_of
from tiered.clock import Clock
from tiered.formats.record import decode_record
from tiered.remoting.command import RequestCode, ResponseCode


class DeliveredQueues:
    """Queue 0 of some topics. Belongs to one event loop; subclasses change ``state``."""

    def __init__(self) -> None:
        self.state = RetryState()
        self._grown = asyncio.Event()
        self.first_free_offset: Callable[[str], int] = lambda topic: 0
        """Topic -> first offset of its queue 0 past the archived messages and those consumed at the broker."""

    def announce(self) -> None:
        """Wake waiting readers."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def delivered(self) -> Coroutine[Any, Any, object]:
        """Awaitable: ends at the next delivery after this call."""
        return self._grown.wait()

    def messages_from(self, topic: str, offset: int, count: int) -> list[RetryMessage]:
        """Up to ``count`` delivered messages from ``offset`` on."""
        queue = self.state.queues.get(topic)
        if queue is None:
            return []
        at = queue.at(offset)
        return [self.state.messages[number] for number in queue.numbers[at : at + count]]

    def pull(self, request: PullRequest, bounds: Bounds) -> PullResult:
        """Return the messages of a queue that were delivered here, from the request's offset on; as many as its filter
        can examine in SLICE_S. ``bounds``: the offsets of the whole queue, of which the archive may have the first
        part."""
        queue = self.state.queues[request.topic]
        if request.offset >= queue.next_offset:
            is_end = request.offset == queue.next_offset
            status = PullStatus.OFFSET_OVERFLOW_ONE if is_end else PullStatus.OFFSET_OVERFLOW_BADLY
            return PullResult(status, request.offset if is_end else queue.next_offset, *bounds)
        message_filter, ends_s = request.filter, time.perf_counter() + SLICE_S
        body: list[bytes] = []
        size = 0
        next_offset = max(request.offset, queue.min_offset) if queue.offsets else queue.next_offset
        for message in self.messages_from(request.topic, request.offset, request.count):
            if message_filter is None or message_filter.keep(memoryview(message.data)):
                if body and size + len(message.data) > request.max_bytes:
                    break
                body.append(message.data)
                size += len(message.data)
            next_offset = message.queue_offset + 1
            if message_filter is not None and time.perf_counter() >= ends_s:
                break
        status = PullStatus.FOUND if body else PullStatus.NO_MATCHED_MESSAGE
        return PullResult(status, next_offset, *bounds, body, len(body))


class _Topics(NamedTuple):
    """Merged topics, and the tables they were made from: queues are only ever added, or the whole table is new."""

    merged: dict[str, TopicConfig]
    archived: dict[str, TopicConfig]
    grown: list[tuple[dict[str, RetryQueue], int]]

    @classmethod
    def of(cls, archived: dict[str, TopicConfig], grown: Sequence[DeliveredQueues]) -> _Topics:
        """Return the archived topics with those added that have messages only here, as of now."""
        names = (name for queues in grown for name in queues.state.queues)
        ours = {name: TopicConfig(name, 1, 1) for name in names if name not in archived}
        sizes = [(queues.state.queues, len(queues.state.queues)) for queues in grown]
        return cls(archived | ours if ours else archived, archived, sizes)

    def is_of(self, grown: Sequence[DeliveredQueues]) -> bool:
        """Return whether no queue was added to ``grown`` since these topics were merged."""
        for queues, (known, count) in zip(grown, self.grown, strict=True):
            now = queues.state.queues
            if now is not known or len(now) != count:
                return False
        return True


class ArchiveWithRetries:
    """An archive whose retry topics grow by what consumers send back."""

    def __init__(self, archive: Backend, *grown: DeliveredQueues) -> None:
        """``grown``: the queues that grow here, in which messages continue the archive's offsets. Questions about
        other queues, and by key, go to ``archive``."""
        self.cluster, self.broker = archive.cluster, archive.broker
        self._archive, self._grown = archive, grown
        self.subscription_groups, self.consumed_end = archive.subscription_groups, archive.consumed_end
        self.archived_topics, self.archived_groups = archive.archived_topics, archive.archived_groups
        self.archived_offset = archive.archived_offset
        self.messages_by_key = archive.messages_by_key
        """Retry messages are not indexed; their archived originals are."""
        self._known: _Topics | None = None
        self._filters = CompiledFilters(Turns())
        for queues in grown:
            queues.first_free_offset = self._first_free_offset

    def _added_to(self, topic: str, queue_id: int) -> tuple[DeliveredQueues, RetryQueue] | None:
        """Return the queue of the messages that this server added behind the archived ones, and the queues that it is
        one of; None if it added none."""
        for queues in self._grown if queue_id == 0 else ():
            if topic in queues.state.queues:
                return queues, queues.state.queues[topic]
        return None

    def _archived_end(self, topic: str) -> int:
        bounds = self._archive.bounds(topic, 0)
        return 0 if bounds is None else bounds.maximum

    def _first_free_offset(self, topic: str) -> int:
        """Return the offset of the first message delivered here: after the archived ones, and after those that groups
        consumed at the broker, which may not be archived (expired, or lost with the broker)."""
        consumed_end = self._archive.consumed_end(topic, 0)
        return max(self._archived_end(topic), consumed_end if consumed_end < PHYS_BASE else 0)

    def topics(self) -> dict[str, TopicConfig]:
        """Return the archived topics and those with messages only here, merged again only when one was added."""
        archived = self._archive.topics()
        known = self._known
        if known is None or known.archived is not archived or not known.is_of(self._grown):
            known = self._known = _Topics.of(archived, self._grown)
        return known.merged

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        """Return the offsets of a queue: of its archived messages and of those that this server added behind them, as
        one; None for an unknown queue. Without archived messages it begins at the oldest added one that is kept."""
        archived = self._archive.bounds(topic, queue_id)
        added = self._added_to(topic, queue_id)
        if added is None:
            return archived
        _, queue = added
        # The queue begins with archived messages if there are any below the first offset that was added here.
        if archived is not None and archived.minimum < min(archived.maximum, queue.first_offset):
            return Bounds(archived.minimum, queue.next_offset)
        return Bounds(queue.min_offset, queue.next_offset)

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        added = self._added_to(topic, queue_id)
        if added is None or not added[1].numbers:
            return self._archive.last_stored_ms(topic, queue_id)
        queues, queue = added
        return queues.state.messages[queue.numbers[-1]].stored_ms

    async def pull(self, request: PullRequest) -> PullResult:
        """Return the messages of a pull: from the archive below the first offset that was added here, else of those
        that were added here."""
        added = self._added_to(request.topic, request.queue_id)
        if added is None:
            return await self._archive.pull(request)
        queues, queue = added
        bounds = self.bounds(request.topic, request.queue_id)
        assert bounds is not None
        if request.offset >= min(queue.first_offset, self._archived_end(request.topic)):
            request.filter = await self._filters.find(request)
            return queues.pull(request, bounds)
        result = await self._archive.pull(request)
        next_offset = min(result.next_offset, queue.first_offset)
        if result.status in (PullStatus.OFFSET_TOO_SMALL, PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE):
            return PullResult(result.status, next_offset, *bounds, result.body, result.records)
        # The end of the archived messages: those added here follow.
        return PullResult(PullStatus.NO_MATCHED_MESSAGE, queue.first_offset, *bounds)

    def pull_from_memory(self, request: PullRequest) -> PullResult | None:
        """Return the result of a pull from memory; None for a queue that grows here, or if memory does not have it."""
        if request.queue_id == 0 and self._added_to(request.topic, 0) is not None:
            return None
        return self._archive.pull_from_memory(request)

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        """Return the first offset stored at or after ``store_ms``, among the archived messages if these reach that
        time, else among those added here. ``upper``: of a time after the last message, its offset instead of the
        end."""
        added = self._added_to(topic, queue_id)
        if added is None or self._archive.last_stored_ms(topic, queue_id) >= store_ms:
            return await self._archive.offset_by_time(topic, queue_id, store_ms, upper=upper)
        queues, queue = added
        for message in queues.messages_from(topic, 0, len(queue.numbers)):
            if message.stored_ms >= store_ms:
                return message.queue_offset
        return queue.next_offset - 1 if upper and queue.numbers else queue.next_offset

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        added = self._added_to(topic, queue_id)
        if added is None or offset < added[1].first_offset:
            return await self._archive.stored_ms(topic, queue_id, offset)
        found = added[0].messages_from(topic, offset, 1)
        return found[0].stored_ms if found and found[0].queue_offset == offset else -1

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[Unit]:
        """Return consume-queue entries of archived messages, or of those added here, whose physical offsets lie
        above those of every commitlog."""
        added = self._added_to(topic, queue_id)
        if added is None or offset < added[1].first_offset:
            return await self._archive.units(topic, queue_id, offset, count)
        return [
            Unit(PHYS_BASE + m.number, len(m.data), tags_code(decode_record(m.data).tags or ""))
            for m in added[0].messages_from(topic, offset, count)
        ]

    async def message_at_phys(self, phys: int) -> bytes | None:
        if phys >= PHYS_BASE:
            found = (queues.state.messages.get(phys - PHYS_BASE) for queues in self._grown)
            return next((message.data for message in found if message is not None), None)
        return await self._archive.message_at_phys(phys)

    def changed(self, timeout_s: float) -> Coroutine[Any, Any, None]:
        """Wait for a change of the archive or a delivery. Not ``async``: events between the call and its first step
        count."""
        return first_of(*(queues.delivered() for queues in self._grown), self._archive.changed(timeout_s))


NUMBER_BASE: Final = 1 << 60
"""Above the number of every retry message."""
MESSAGES_KEPT: Final = 1_000
HELD_BYTES_MAX: Final = 16 * 1024 * 1024
"""Limit of these messages; a proxy's message has some hundred bytes."""
BODY_BYTES_MAX: Final = 256 * 1024


class ProxyTopic(DeliveredQueues):
    """The topic's messages, and the send handler."""

    def __init__(self, made: Mapping[str, TopicConfig], clock: Clock) -> None:
        """``made``: topics created here."""
        super().__init__()
        self._made, self._clock = made, clock
        self.state.next_number = NUMBER_BASE

    def register(self, table: HandlerTable) -> None:
        table.register(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2)(self.send)

    async def send(self, request: Request) -> Response:
        """SEND_MESSAGE: refused, as archives are read-only, but for the topic through which RocketMQ 5 proxies share
        their clients, once a proxy has created it."""
        if request.text("topic") != PROXY_TOPIC or PROXY_TOPIC not in self._made:
            return Response(ResponseCode.NO_PERMISSION, remark=READ_ONLY)
        body, properties = request.command.body, request.text("properties", "").encode()
        if len(body) > BODY_BYTES_MAX or len(properties) >= 1 << 15:
            return Response(ResponseCode.SYSTEM_ERROR, remark="message too large")
        flag, sys_flag = request.number("flag", 0), request.number("sysFlag", 0)
        data = encode_record(
            PROXY_TOPIC,
            properties,
            body,
            (_ipv4_host(request.peer.address), _ipv4_host("")),
            flag=flag & 0x7FFF_FFFF,
            sys_flag=sys_flag & 0x7FFF_FFCF,  # without the bits that say the hosts are IPv6 addresses
            born_ms=request.number("bornTimestamp", 0),
            body_crc=zlib.crc32(body) & 0x7FFF_FFFF,
        )
        message = self._keep(data)
        ext = {
            "msgId": decode_record(message.data).offset_msg_id,
            "queueId": "0",
            "queueOffset": str(message.queue_offset),
        }
        return Response(ext=ext)

    def _keep(self, data: bytes) -> RetryMessage:
        """Add a message to the topic that RocketMQ's proxies use among themselves (PROXY_TOPIC), and return it. It is
        held in memory only, as proxies read it at once. Above MESSAGES_KEPT, or HELD_BYTES_MAX of all retry topics, the
        topic's oldest messages are dropped."""
        state, now_ms = self.state, self._clock.wall_ms()
        message = RetryMessage(state.next_number, PROXY_TOPIC, now_ms, data)
        queue = state.queues.get(PROXY_TOPIC)
        next_offsets = {PROXY_TOPIC: 0 if queue is None else queue.next_offset}
        deliveries = tuple(assign_offsets([message], next_offsets, now_ms))
        state.apply(RetryObject(0, "", "", state.next_number + 1, (message,), deliveries))
        state.release(PROXY_TOPIC, next_offsets[PROXY_TOPIC] - MESSAGES_KEPT)
        while state.held_bytes > HELD_BYTES_MAX:
            state.release(PROXY_TOPIC, state.queues[PROXY_TOPIC].offsets[0] + 1)
        self.announce()
        return message


def _ipv4_host(address: str) -> bytes:
    """Return ``address`` in the form of a record's host fields; 127.0.0.1:0 for a host name or an IPv6 address."""
    host = host_bytes(address)
    return host if host is not None and len(host) == 8 else bytes([127, 0, 0, 1, 0, 0, 0, 0])
