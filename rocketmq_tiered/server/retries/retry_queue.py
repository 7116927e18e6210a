"""Retry messages on the event loop: stored before they are acknowledged, delivered after their delay.

Messages that arrive during a write go into the next object. The owner of the group offsets owns them; another server
refuses them, and the consumer then consumes its message again itself. ``RetryHandlers`` accept what consumers send
back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_tiered.server.backend.backend import Backend
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.retries.retry_log import (
    MESSAGE_BYTES,
    EncodedRetry,
    RetryLog,
    RetryMessage,
    RetryObject,
    assign_offsets,
    encode_retry,
    queue_bytes,
)
from rocketmq_tiered.server.retries.retry_topics import DeliveredQueues
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tiered.clock import Clock
from tiered.errors import FencedError, StoreFullError, TieredError, UsageError
from tiered.formats.record import decode_record
from tiered.model.queue import DEAD_PREFIX, RETRY_PREFIX
from tiered.remoting.command import RequestCode, ResponseCode

logger = logging.getLogger(__name__)

NOT_WRITTEN = (
    "retry messages could not be written, and the next attempt follows; until then none is acknowledged: %s"
)
OBJECTS_MAX = 256
"""A base replaces this many objects."""
CHECK_S = 1.0
AGAIN_S = 1.0


@dataclass(frozen=True)
class RetryLimits:
    """``held_bytes_max``: memory for messages, which are in the store too; ``dead_keep_ms``: retention of dead
    letters."""

    held_bytes_max: int = 64 * 1024 * 1024
    dead_keep_ms: int = 30 * 86_400_000


class RetryQueues(DeliveredQueues):
    """All retry messages. Belongs to one event loop."""

    def __init__(self, log: RetryLog, offsets: GroupOffsets, limits: RetryLimits, clock: Clock) -> None:
        """``log`` stores the messages; ``offsets``: of the groups, whose owner alone stores and delivers retry
        messages; ``limits``: of memory, and how long dead letters stay."""
        super().__init__()
        self._log, self._offsets, self._limits, self._clock = log, offsets, limits, clock
        self._queued: list[tuple[EncodedRetry, int, asyncio.Future[None]]] = []
        """Messages not written yet, with their memory and waiter."""
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._removed_version = 0
        self.is_owner = False

    async def claim(self) -> None:
        """Read all messages and become the writer, if this server owns the groups. Raises what the store raises."""
        if self._offsets.is_owner and not self.is_owner:
            try:
                self.state = await asyncio.to_thread(self._log.claim)
            except FencedError as error:
                logger.warning(
                    "this server refuses retry messages until it owns those of the archive: %s", error
                )
                return
            self.is_owner = True
            self.announce()

    # -- sending back -----------------------------------------------------------------------------------------

    async def add(self, message: EncodedRetry) -> None:
        """Store a retry message, and return once it is durable. Raises FencedError if another server owns the consumer
        groups, and StoreFullError if there is no memory for the message."""
        if not (self.is_owner and self._offsets.is_owner):
            raise FencedError(
                "the retry message is not stored, as another server owns the consumer groups of this archive"
            )
        more_bytes = MESSAGE_BYTES + len(message.data)
        more_bytes += 0 if self.state.has_topic(message.topic) else queue_bytes(message.topic)
        if self.state.held_bytes + self._queued_bytes + more_bytes > self._limits.held_bytes_max:
            raise StoreFullError(
                "the retry message is not stored, as the memory for retry messages is used up: raise serve.memory_bytes"
            )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queued.append((message, more_bytes, future))
        self._queued_bytes += more_bytes
        self._wake.set()
        await asyncio.shield(future)

    async def run(self) -> None:
        """Write the retry messages that come in, and deliver those whose delay is over, until cancelled. While another
        server owns the consumer groups, messages are refused."""
        while True:
            await self._sleep()
            try:
                if not self._offsets.is_owner:
                    self._disown(
                        FencedError("another server has taken over the consumer groups of this archive")
                    )
                await self.claim()
                if self.is_owner:
                    await self._step()
            except FencedError as error:
                logger.error(
                    "this server refuses retry messages until it owns the consumer groups again: %s", error
                )
                self._disown(error)
            except TieredError as error:
                logger.warning(NOT_WRITTEN, error)
                await asyncio.sleep(AGAIN_S)

    async def _sleep(self) -> None:
        """Wait until the delay of a message is over or one comes in, and no longer than CHECK_S, as clocks may jump."""
        due_ms, wait_s = self.state.next_due_ms(), CHECK_S
        if due_ms is not None:
            wait_s = min(wait_s, max(0.0, (due_ms - self._clock.wall_ms()) / 1000))
        with contextlib.suppress(TimeoutError):  # a message is due
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        self._wake.clear()

    def _disown(self, error: FencedError) -> None:
        """Refuse the messages that wait to be written with ``error``, and all later ones until the next claim."""
        self.is_owner = False
        queued, self._queued, self._queued_bytes = self._queued, [], 0
        for *_, future in queued:
            if not future.done():
                future.set_exception(error)

    async def _step(self) -> None:
        """Write one object with the messages that came in and the deliveries that are due; then acknowledge the former
        and deliver the latter. After OBJECTS_MAX objects, write one with everything (a base), which replaces them."""
        self._release()
        now_ms, queued = self._clock.wall_ms(), self._queued
        self._queued = []
        added = tuple(
            RetryMessage(
                self.state.next_number + index, message.topic, now_ms + message.delay_ms, message.data
            )
            for index, (message, *_) in enumerate(queued)
        )
        due = [*self.state.due(now_ms), *(message for message in added if message.due_ms <= now_ms)]
        if added or due:
            next_offsets = {message.topic: self._next_offset(message.topic) for message in due}
            retry_object = RetryObject(
                self._log.version + 1,
                self._log.owner,
                self._log.owner_name,
                self.state.next_number + len(added),
                added,
                tuple(assign_offsets(due, next_offsets, now_ms)),
            )
            await self._write(retry_object, [future for *_, future in queued])
            self._queued_bytes -= sum(byte_count for _, byte_count, _ in queued)
            self.state.apply(retry_object)
            for *_, future in queued:
                if not future.done():
                    future.set_result(None)
            if due:
                self.announce()
        if self._log.version - self._log.base_version >= OBJECTS_MAX:
            base = self.state.base(self._log.version + 1, self._log.owner, self._log.owner_name)
            await self._write(base, [])
        if self._removed_version < self._log.base_version:
            await asyncio.to_thread(self._log.remove_replaced)
            self._removed_version = self._log.base_version

    async def _write(self, retry_object: RetryObject, waiting: list[asyncio.Future[None]]) -> None:
        """Write an object, again and again until it exists: after a lost reply nothing else may be written. If another
        server has taken over, FencedError is raised, here and to the requests that wait (``waiting``)."""
        while True:
            try:
                await asyncio.to_thread(self._log.write, retry_object)
            except FencedError as error:
                for future in waiting:
                    if not future.done():
                        future.set_exception(error)
                raise
            except TieredError as error:
                logger.warning(NOT_WRITTEN, error)
                await asyncio.sleep(AGAIN_S)
            else:
                return

    def _next_offset(self, topic: str) -> int:
        queue = self.state.queues.get(topic)
        return queue.next_offset if queue is not None else self.first_free_offset(topic)

    def _release(self) -> None:
        """Remove the retry messages that their group has consumed, as its stored offset says, and dead letters that
        were kept for ``dead_keep_ms``."""
        oldest_ms = self._clock.wall_ms() - self._limits.dead_keep_ms
        for topic, queue in self.state.queues.items():
            if topic.startswith(RETRY_PREFIX):
                group = topic.removeprefix(RETRY_PREFIX)
                self.state.release(topic, self._offsets.durable(group, topic, 0))
            elif topic.startswith(DEAD_PREFIX):
                while queue.numbers and self.state.messages[queue.numbers[0]].stored_ms < oldest_ms:
                    self.state.release(topic, queue.offsets[0] + 1)

    async def close(self) -> None:
        """Fail waiting requests; acknowledged messages are durable already."""
        self._disown(FencedError("the retry message is not stored, as this server stops"))


class RetryHandlers:
    """Accepts retry messages. A client whose request is refused consumes the message again after five seconds."""

    def __init__(
        self,
        archive: Backend,
        routes: RouteTable,
        retries: RetryQueues,
        refusal_of_record: Callable[[Request, bytes, int], Response | None] = lambda *_: None,
    ) -> None:
        """``refusal_of_record`` returns the reply to a client that may not read the topic of the message it sends back,
        None if it may: a retry would reveal the message, whatever topic the request names."""
        self._archive, self._routes, self._retries = archive, routes, retries
        self._refusal_of_record = refusal_of_record

    def register(self, table: HandlerTable) -> None:
        table.register(RequestCode.CONSUMER_SEND_MSG_BACK)(self.send_back)

    async def send_back(self, request: Request) -> Response:
        """CONSUMER_SEND_MSG_BACK: a consumer could not process a message, which becomes a retry message of its group or
        a dead letter. The reply comes once that is durable."""
        group, phys = request.name("group"), request.number("offset")
        if (refusal := self._routes.group_refusal(group)) is not None:
            return refusal
        config = self._routes.group_config(group)
        if int(config["retryQueueNums"]) <= 0:
            return Response()  # as at a broker: the group has no retries
        data = await self._archive.message_at_phys(phys)
        if data is None:
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"look message by offset failed, {phys}")
        if (refusal := self._refusal_of_record(request, data, phys)) is not None:
            return refusal
        source = decode_record(data)
        try:
            message = encode_retry(
                source,
                group,
                delay_level=request.number("delayLevel"),
                times_max=request.number("maxReconsumeTimes", int(config["retryMaxTimes"])),
                address=self._routes.address,
            )
            await self._retries.add(message)
        except FencedError as error:
            return Response(ResponseCode.NO_PERMISSION, remark=str(error))
        except StoreFullError as error:
            return Response(ResponseCode.SYSTEM_BUSY, remark=str(error))
        except UsageError as error:
            return Response(ResponseCode.SYSTEM_ERROR, remark=str(error))
        return Response()
