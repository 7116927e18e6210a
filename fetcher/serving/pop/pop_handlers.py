"""POP on the event loop (200050, 200051, 200151, 200053): what gRPC clients use through a RocketMQ 5 proxy.

A group's offset follows the messages acknowledged without a gap, and becomes durable soon after, as a broker's does.
A group whose offsets are another server's cannot pop here. A new group begins with the first archived message: a proxy
always asks for the end (initMode), where an archive has nothing to give.

Owns the requests and waiting. What is in somebody's hands is pop_state.py's.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fetcher.serving.archive_side import ArchiveSide, PullStatus, PullWish
from fetcher.serving.group_offsets import GroupOffsets
from fetcher.serving.pop.pop_messages import given_again, handle_of, offset_fields, records
from fetcher.serving.pop.pop_state import PopQueue
from fetcher.serving.routes import RouteTable
from fetcher.serving.session import TAG
from fetcher.serving.wire.codes import RequestCode, ResponseCode
from fetcher.serving.wire.request import BadRequestError, HandlerTable, Request, Response
from tiered.errors import UsageError

COUNT_MAX = 32
IN_HAND_MAX = 2_000
"""Messages of a queue that a group may have in hand; more are given out when some are acknowledged."""
HOLD_S_MAX = 25.0
EMPTY_STEPS_MAX = 64
"""Steps over messages that the filter does not want, in one request and queue."""


@dataclass(frozen=True)
class PopWish:
    """What one request asks for. ``in_order``: nothing of a queue while something of it is in hand."""

    group: str
    topic: str
    count: int
    invisible_ms: int
    expression: str
    expression_type: str
    in_order: bool


@dataclass
class _Place:
    """A queue of a group, taken by one request at a time. ``noted``: the offset last told to the group's."""

    state: PopQueue
    noted: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_s: float = 0.0


@dataclass
class _Answer:
    """What was found so far: records in order, and their offsets by queue."""

    body: list[bytes] = field(default_factory=list)
    offsets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    rest: int = 0
    size: int = 0


class PopHandlers:
    """Gives messages out and takes acknowledgements. ``clock_ms``: the time of day."""

    def __init__(
        self,
        archive: ArchiveSide,
        routes: RouteTable,
        offsets: GroupOffsets,
        *,
        bytes_max: int = 4 * 1024 * 1024,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._archive, self._routes, self._offsets = archive, routes, offsets
        self._bytes_max, self._clock_ms = bytes_max, clock_ms
        self._places: dict[tuple[str, str, int], _Place] = {}
        self._first_queue = 0
        self._freed = asyncio.Event()

    def register(self, table: HandlerTable) -> None:
        """200050, 200051, 200053, 200151."""
        table.register(RequestCode.POP_MESSAGE)(self.pop)
        table.register(RequestCode.ACK_MESSAGE)(self.acknowledge)
        table.register(RequestCode.BATCH_ACK_MESSAGE)(self.acknowledge_many)
        table.register(RequestCode.CHANGE_MESSAGE_INVISIBLETIME)(self.hide)

    # -- popping ----------------------------------------------------------------------------------------------

    async def pop(self, request: Request) -> Response:
        """POP_MESSAGE; waits as long as the client said when there is nothing."""
        topic, queue_id = request.text("topic"), request.number("queueId", -1)
        config = self._routes.find(topic)
        if config is None:
            return Response(ResponseCode.TOPIC_NOT_EXIST, remark=f"topic {topic} is not in the archive")
        if queue_id >= max(config.read_queues, 1):
            return Response(ResponseCode.SYSTEM_ERROR, remark=f"{topic} has no queue {queue_id}")
        if not self._offsets.is_owner:
            remark = "consumer groups of this archive are served by another server"
            return Response(ResponseCode.NO_PERMISSION, remark=remark)
        wish = _wish(request)
        queues = [queue_id] if queue_id >= 0 else self._rotated(config.read_queues)
        ends_s = time.monotonic() + min(max(request.number("pollTime", 0), 0) / 1000, HOLD_S_MAX)
        while True:
            try:
                answer = await self._gather(wish, queues)
            except UsageError as error:
                return Response(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark=str(error))
            left_s = ends_s - time.monotonic()
            if answer.body or left_s <= 0:
                return self._response(wish, answer)
            await self._changed(wish, queues, left_s)

    def _rotated(self, count: int) -> list[int]:
        """All queues, beginning with another one each time."""
        self._first_queue += 1
        return [(self._first_queue + number) % count for number in range(count)]

    async def _changed(self, wish: PopWish, queues: list[int], left_s: float) -> None:
        due = (
            place.state.next_visible_ms()
            for queue_id in queues
            if (place := self._places.get((wish.group, wish.topic, queue_id))) is not None
        )
        due_ms = min((visible_ms for visible_ms in due if visible_ms is not None), default=None)
        if due_ms is not None:
            left_s = min(left_s, max(0.01, (due_ms - self._clock_ms()) / 1000))
        loop = asyncio.get_running_loop()
        waits = {
            loop.create_task(self._archive.changed(left_s)),
            loop.create_task(_event(self._freed)),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _response(self, wish: PopWish, answer: _Answer) -> Response:
        ext = {
            "popTime": str(self._popped_ms(wish, answer)), "invisibleTime": str(wish.invisible_ms), "reviveQid": "0",
            "restNum": str(answer.rest), **offset_fields(answer.offsets),
        }  # fmt: skip
        code = ResponseCode.SUCCESS if answer.body else ResponseCode.POLLING_TIMEOUT
        return Response(code, ext, answer.body)

    def _popped_ms(self, wish: PopWish, answer: _Answer) -> int:
        """One time for all of an answer: receipts name it."""
        now_ms = self._clock_ms()
        for queue_id, offsets in answer.offsets.items():
            in_hand = self._places[wish.group, wish.topic, queue_id].state.in_hand
            for offset in offsets:
                if offset in in_hand:
                    in_hand[offset].popped_ms = now_ms
        return now_ms

    async def _gather(self, wish: PopWish, queues: list[int]) -> _Answer:
        answer = _Answer()
        for queue_id in queues:
            bounds = self._archive.bounds(wish.topic, queue_id)
            if bounds is None:
                continue
            place = self._place(wish, queue_id)
            async with place.lock:
                if len(answer.body) < wish.count:
                    await self._repeat(wish, queue_id, place, answer)
                    await self._give(wish, queue_id, place, answer)
                self._note(wish.group, wish.topic, queue_id, place)
                answer.rest += max(0, bounds.maximum - place.state.next_offset)
        return answer

    def _place(self, wish: PopWish, queue_id: int) -> _Place:
        key = wish.group, wish.topic, queue_id
        known = self._offsets.find(*key)
        if known is None:
            known = self._archive.archived_offset(*key)
        place = self._places.get(key)
        if not self._offsets.has_room(*key):  # its offset would be lost, and everything come again
            raise BadRequestError("no offsets of new groups are kept (serve.offsets_bytes_max)")
        if place is None or (known is not None and known != place.noted):  # new, or the group was moved
            if known is None:
                bounds = self._archive.bounds(wish.topic, queue_id)
                known = 0 if bounds is None else bounds.minimum
            place = self._places[key] = _Place(PopQueue(known), known)
            self._offsets.note(*key, known)
        place.used_s = time.monotonic()
        return place

    async def _repeat(self, wish: PopWish, queue_id: int, place: _Place, answer: _Answer) -> None:
        """What was not acknowledged in time."""
        visible = place.state.visible(self._clock_ms())
        if wish.in_order and len(visible) < len(place.state.in_hand):
            return
        for offset in visible:
            if len(answer.body) >= wish.count or answer.size >= self._bytes_max:
                return
            found = await self._archive.pull(self._pull(wish, queue_id, offset, 1, "*", TAG))
            popped = (
                next(iter(records(found.body, wish.topic)), None)
                if found.status is PullStatus.FOUND
                else None
            )
            if popped is None or popped.offset != offset:
                place.state.acknowledge(offset)  # it is gone: nobody can get it any more
                continue
            in_hand = place.state.give(offset, self._clock_ms(), wish.invisible_ms)
            _add(answer, queue_id, offset, given_again(popped.data, in_hand.times))

    async def _give(self, wish: PopWish, queue_id: int, place: _Place, answer: _Answer) -> None:
        """What nobody had yet."""
        state = place.state
        for _ in range(EMPTY_STEPS_MAX):
            count = min(wish.count - len(answer.body), IN_HAND_MAX - len(state.in_hand))
            if count <= 0 or answer.size >= self._bytes_max or (wish.in_order and state.in_hand):
                return
            pull = self._pull(wish, queue_id, state.next_offset, count, wish.expression, wish.expression_type)
            found = await self._archive.pull(pull)
            if found.status is PullStatus.FOUND:
                for popped in records(found.body, wish.topic):
                    state.give(popped.offset, self._clock_ms(), wish.invisible_ms)
                    _add(answer, queue_id, popped.offset, popped.data)
                state.skip_to(found.next_offset)
                return
            if found.status not in (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL):
                return
            if found.next_offset <= state.next_offset:
                return
            state.skip_to(found.next_offset)

    def _pull(
        self, wish: PopWish, queue_id: int, offset: int, count: int, expression: str, kind: str
    ) -> PullWish:
        return PullWish(wish.topic, queue_id, offset, count, self._bytes_max, wish.group, expression, kind)

    def _note(self, group: str, topic: str, queue_id: int, place: _Place) -> None:
        done = place.state.done_offset
        if done > place.noted and self._places.get((group, topic, queue_id)) is place:
            place.noted = done
            self._offsets.note(group, topic, queue_id, done)

    # -- acknowledging ----------------------------------------------------------------------------------------

    async def acknowledge(self, request: Request) -> Response:
        """ACK_MESSAGE."""
        key = request.text("consumerGroup"), request.text("topic"), request.number("queueId")
        return self._acknowledged(key, [request.number("offset")])

    async def acknowledge_many(self, request: Request) -> Response:
        """BATCH_ACK_MESSAGE: bits count from a start offset."""
        code = Response()
        for item in request.document().get("acks") or []:
            try:
                start, bits = int(item["so"]), base64.b64decode(str(item["b"]), validate=True).rstrip(b"\0")
                key = str(item["c"]), str(item["t"]), int(item["q"])
            except (KeyError, TypeError, ValueError) as error:
                raise BadRequestError(f"an acknowledgement does not parse: {error!r}") from error
            found = self._acknowledged(key, self._named(key, start, bits))
            code = code if found.code == ResponseCode.SUCCESS else found
        return code

    def _named(self, key: tuple[str, str, int], start: int, bits: bytes) -> list[int]:
        """Offsets that ``bits``, counted from ``start``, name: of very many the last, and those in hand."""
        if not bits:
            return []
        place = self._places.get(key)
        last = 8 * (len(bits) - 1) + bits[-1].bit_length() - 1
        numbers: Iterable[int] = range(last)
        if last > IN_HAND_MAX:
            in_hand = place.state.in_hand if place is not None else {}
            numbers = (offset - start for offset in in_hand if 0 <= offset - start < last)
        return [start + n for n in (*numbers, last) if bits[n // 8] >> n % 8 & 1]

    def _acknowledged(self, key: tuple[str, str, int], offsets: list[int]) -> Response:
        bounds = self._archive.bounds(key[1], key[2])
        if bounds is None or any(not 0 <= offset <= bounds.maximum for offset in offsets):
            return Response(ResponseCode.NO_MESSAGE, remark=f"offsets {offsets[:3]} of {key[1]} do not exist")
        place = self._places.get(key)
        if place is not None:
            for offset in offsets:
                place.state.acknowledge(offset)
            self._note(*key, place)
            self._wake()
        return Response()  # one from before a restart: the message comes again, as after a broker's

    async def hide(self, request: Request) -> Response:
        """CHANGE_MESSAGE_INVISIBLETIME: longer, or at once with 0."""
        key = request.text("consumerGroup"), request.text("topic"), request.number("queueId")
        offset, invisible_ms = request.number("offset"), max(0, request.number("invisibleTime"))
        try:
            handle = handle_of(request.text("extraInfo"))
        except UsageError as error:
            raise BadRequestError(str(error)) from error
        place, now_ms = self._places.get(key), self._clock_ms()
        if place is None or not place.state.hide(offset, handle.popped_ms, now_ms, invisible_ms):
            return Response(ResponseCode.NO_MESSAGE, remark=f"offset {offset} is not in this client's hands")
        self._wake()
        return Response(ext={"popTime": str(now_ms), "invisibleTime": str(invisible_ms), "reviveQid": "0"})

    def _wake(self) -> None:
        """Wake who waits: a queue in order may be free, a message may be visible earlier."""
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def expire(self, idle_s: float = 600.0) -> None:
        """Forget queues that nobody uses and where nothing is in hand."""
        limit_s = time.monotonic() - idle_s
        self._places = {
            key: place
            for key, place in self._places.items()
            if place.used_s > limit_s or place.state.in_hand or place.lock.locked()
        }


async def _event(event: asyncio.Event) -> None:
    await event.wait()


def _add(answer: _Answer, queue_id: int, offset: int, data: bytes) -> None:
    answer.body.append(data)
    answer.offsets[queue_id].append(offset)
    answer.size += len(data)


def _wish(request: Request) -> PopWish:
    return PopWish(
        group=request.name("consumerGroup"),
        topic=request.text("topic"),
        count=max(1, min(request.number("maxMsgNums", COUNT_MAX), COUNT_MAX)),
        invisible_ms=max(0, request.number("invisibleTime")),
        expression=request.text("exp", "*") or "*",
        expression_type=request.text("expType", TAG) or TAG,
        in_order=request.flag("order"),
    )
