"""The broker's state of each queue, for the read policy: from its files, else from requests to the broker.

If its files are unreadable, as the consume queues in a running broker's RocksDB, the broker is queried over the pulling
client's connection with that client's own fields, so that a signature on them stays valid. States are cached while
the broker's log begins at the same offset; a pull that was too late is noticed in the broker's reply
(offset_merge.interpret). Records in the broker's oldest file count as expiring, and as many above its minimum as the
last deletion removed. Does not own the decision (read_router.py).
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fetcher.policy.broker_files import BrokerFiles
from fetcher.policy.read_policy import BrokerSide, HeldOffsets, LocalView, Residency
from rocketmq_tiered.server.proxy.offset_merge import is_expiring, next_deletion_margin
from rocketmq_tiered.server.proxy.proxy_handlers import Upstream
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import NotFoundError, TieredError, UnavailableError
from tiered.model.lru import Lru
from tiered.remoting.client import document_of
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

ASK_TIMEOUT_S = 3.0
UNKNOWN_PHYS = (1 << 63) - 1
GONE_PHYS = -2
"""The record no longer exists, by a broker that returns others."""
SIGNATURE = "Signature"


async def query_log_begin(command: RemotingCommand, upstream: Upstream) -> int:
    """Return the physical offset at which the broker's log begins; UNKNOWN_PHYS if it is away or does not say.
    ``command``: a client's request, with whose fields the broker is queried."""
    try:
        answer = await upstream.call(_ask(command, RequestCode.GET_BROKER_RUNTIME_INFO), ASK_TIMEOUT_S)
    except UnavailableError:
        return UNKNOWN_PHYS
    table = document_in(answer).get("table")
    text = table.get("commitLogMinOffset") if isinstance(table, Mapping) else None
    return int(text) if isinstance(text, str) and text.isdecimal() else UNKNOWN_PHYS


def _ask(command: RemotingCommand, code: RequestCode, **fields: object) -> RemotingCommand:
    """Another request about the queue of ``command``, with its fields: a signature covers the fields only."""
    others = {name: str(value) for name, value in fields.items()}
    return replace(command, code=int(code), ext_fields={**command.ext_fields, **others}, body=b"")


async def query_offset(command: RemotingCommand, upstream: Upstream, code: RequestCode) -> int | None:
    """The offset returned; None if the broker refuses."""
    answer = await upstream.call(_ask(command, code), ASK_TIMEOUT_S)
    if answer.code == ResponseCode.SYSTEM_BUSY:
        raise UnavailableError(answer.remark or "the broker is busy")
    return number_in(answer, "offset")


def number_in(answer: RemotingCommand, name: str) -> int | None:
    """A numeric field of a SUCCESS reply, or None."""
    text = answer.ext_fields.get(name, "")
    is_number = answer.code == ResponseCode.SUCCESS and text.removeprefix("-").isdecimal()
    return int(text) if is_number else None


async def query_phys(command: RemotingCommand, upstream: Upstream, offset: int) -> int:
    """Return the physical offset of the message at queue offset ``offset``, GONE_PHYS if the broker has none there, -1
    if it does not say. ``command``: a client's request about the queue, with whose fields the broker is queried."""
    if SIGNATURE in command.ext_fields:
        return -1  # additional fields would break the signature
    query = _ask(command, RequestCode.QUERY_CONSUME_QUEUE, index=offset, count=1)
    document = document_in(await upstream.call(query, ASK_TIMEOUT_S))
    rows = document.get("queueData")
    row = rows[0] if isinstance(rows, list) and rows else None
    if not isinstance(row, Mapping):
        return GONE_PHYS if "maxQueueIndex" in document else -1
    return int(row.get("physicOffset", -1))


async def query_record(command: RemotingCommand, upstream: Upstream, offset_field: str) -> RemotingCommand:
    """Return the broker's reply to a request for the message at the physical offset that ``command`` has in the field
    ``offset_field``; without a body if it is an error. Raises UnavailableError while the broker is away or busy."""

    def renamed(name: str) -> str:
        """A signature covers the values of the fields in the order of their names, and not the names: they are renamed
        so that only the offset has a name that the broker reads here, and that their order stays."""
        if not name[:1].islower():  # the fields of the signature itself
            return name
        return "offset" if name == offset_field else f"{'a' if name < offset_field else 'p'}{name}"

    fields = {offset_field: ""} | dict(command.ext_fields)
    ext_fields = {renamed(name): value for name, value in fields.items()}
    query = replace(command, code=int(RequestCode.VIEW_MESSAGE_BY_ID), flag=0, ext_fields=ext_fields)
    answer = await upstream.call(query, ASK_TIMEOUT_S)
    if answer.code == ResponseCode.SYSTEM_BUSY:
        raise UnavailableError(answer.remark or "the broker is busy")
    return answer if answer.code == ResponseCode.SUCCESS else replace(answer, body=b"")


def document_in(answer: RemotingCommand) -> Mapping[str, object]:
    """Return the JSON object in the body of a reply; empty if the reply is an error, or its body is no JSON object."""
    with suppress(UnavailableError):
        return document_of(answer) if answer.code == ResponseCode.SUCCESS else {}
    return {}


KNOWN_BYTES_MAX = 32 * 1024 * 1024
QUEUE_BYTES = 1_200
"""A cached queue of the broker, without its name: measured."""
RELEARN_S = 60.0
AWAITED_S = 0.1
"""After so long a wait for a reply, what was known before may be of an earlier generation."""


@dataclass(frozen=True)
class _Known:
    """``learnt_s``: when all was read, ``max_s``: when the maximum was read last."""

    side: BrokerSide
    learnt_s: float
    max_s: float
    queue: HeldOffsets | None = None
    first_phys: int = -1
    """Position of the record at the minimum; GONE_PHYS if it was deleted during the query, -1 if unknown."""
    last_phys: int = -1
    oldest_phys: int = 0
    """Where the broker's log begins."""
    oldest_file: Path | None = None
    kept_from: int = 0
    """Offset of the first record that is not in the broker's oldest file."""
    margin: int = 0


class QueueBegin(NamedTuple):
    """The first offset of a queue, and the position of its record in the log; of a consumer, those of a record that it
    got."""

    offset: int
    phys: int

    def is_after(self, read: QueueBegin) -> bool:
        """Whether the record ``read`` is of a generation that ended: it is in front of the queue's first, whose offset
        is not above its own."""
        return self.offset <= read.offset and self.phys > read.phys


@dataclass
class BrokerViews:
    """Belongs to one event loop. ``files``: None if they are not accessible."""

    files: BrokerFiles | None = None
    executor: Executor | None = None
    keep_s: float = 1.0
    clock: Clock = MACHINE_CLOCK

    def __post_init__(self) -> None:
        self._known: Lru[tuple[str, int], _Known] = Lru(KNOWN_BYTES_MAX, resists_floods=True)
        self._oldest: tuple[float, int] | None = None

    async def local_view(self, command: RemotingCommand, upstream: Upstream, offset: int) -> LocalView:
        """Return what the broker has of the queue that ``command`` names, as far as a pull at ``offset`` needs to
        know."""
        queue = _queue_of(command)
        known = self._known.peek(queue)
        if known is None or await self._is_stale(known, command, upstream, offset):
            known = await self._learn(queue, command, upstream, known)
        return _view(known, offset)

    async def _is_stale(
        self, known: _Known, command: RemotingCommand, upstream: Upstream, offset: int
    ) -> bool:
        """Return whether the cached state ``known`` of a queue has to be read again for ``offset``: the broker may have
        got messages at this offset since, or may have deleted its oldest file."""
        now_s = self.clock.monotonic_s()
        if known.queue is None or offset >= known.queue.max_offset:
            return now_s - known.max_s >= self.keep_s
        if now_s - known.learnt_s >= RELEARN_S:
            return True
        return known.oldest_phys != await self._oldest_phys(command, upstream)

    async def still_has(self, command: RemotingCommand, upstream: Upstream, offset: int) -> bool:
        """Return whether the broker still has the message at ``offset`` of the queue that ``command`` names. If so, its
        earlier reply, from there on, lacked no message because of deletion: a broker deletes its oldest first."""
        queue = _queue_of(command)
        known = self._known.peek(queue)
        is_known = known is not None and known.queue is not None and offset >= known.queue.min_offset
        if known is not None and is_known and known.oldest_file is not None and known.oldest_file.exists():
            return True  # nothing was deleted since the files were listed
        self._oldest = None
        if self.files is not None:
            self.files.expire()
        has_first = known is not None and is_known and known.first_phys != GONE_PHYS
        if known is None or not has_first or known.oldest_phys != await self._oldest_phys(command, upstream):
            known = await self._learn(queue, command, upstream, known)
        if 0 <= known.first_phys < known.oldest_phys or known.first_phys == GONE_PHYS:
            return False  # the queue's first record is deleted, and the broker has not raised its minimum yet
        if known.queue is None:
            # The reply of a broker that does not report its queues is accepted; not that of one which will do so later.
            return known.side is BrokerSide.UNREPORTED
        # During deletions the oldest file may be gone already.
        return offset >= max(known.queue.min_offset, known.kept_from)

    async def begin(self, command: RemotingCommand, upstream: Upstream, waited_s: float) -> QueueBegin | None:
        """Return where the broker's queue begins now, None if the broker does not say. It is read again after
        ``keep_s``, or if the broker took long (``waited_s``) to reply to ``command``: the topic may have been recreated
        since."""
        queue = _queue_of(command)
        known = self._known.peek(queue)
        if known is None or waited_s >= AWAITED_S or self.clock.monotonic_s() - known.learnt_s >= self.keep_s:
            known = await self._learn(queue, command, upstream, known)
        return None if known.queue is None else QueueBegin(known.queue.min_offset, known.first_phys)

    async def residency(
        self, topic: str, queue_id: int, offset: int, count: int, max_bytes: int
    ) -> Residency:
        """Return whether the broker would find the messages of a pull in memory, or read them from its disk. Unknown
        without access to its files."""
        if self.files is None:
            return Residency.UNKNOWN
        files = self.files

        def look() -> Residency:
            try:
                return files.residency(topic, queue_id, offset, count=count, max_bytes=max_bytes)
            except NotFoundError:
                return Residency.COLD
            except TieredError:
                return Residency.UNKNOWN

        return await asyncio.get_running_loop().run_in_executor(self.executor, look)

    def note(self, topic: str, queue_id: int, minimum: int, maximum: int) -> None:
        """Take the minimum and maximum offset of a queue that the broker's reply to a pull reported into the cached
        state. A raised minimum means that the broker has deleted files: then all else has to be read again."""
        known = self._known.peek((topic, queue_id))
        if known is None or known.queue is None:
            return
        if maximum < known.queue.max_offset:
            self._known.pop((topic, queue_id))  # the log was truncated, or the topic recreated
            return
        step = minimum - known.queue.min_offset
        if step > 0:
            self._forget_log_begin(known)
        queue = HeldOffsets(max(minimum, known.queue.min_offset), maximum)
        noted = replace(
            known,
            queue=queue,
            first_phys=-1 if step > 0 else known.first_phys,
            margin=next_deletion_margin(known.margin, step),
            # At once too old to be used, but for the minimum: the next pull reads the rest again.
            learnt_s=known.learnt_s if step <= 0 else -math.inf,
            max_s=self.clock.monotonic_s() if step <= 0 else -math.inf,
        )
        self._known.put((topic, queue_id), noted, QUEUE_BYTES + sys.getsizeof(topic))

    def _forget_log_begin(self, known: _Known) -> None:
        """Forget where the broker's log begins, as it has deleted files, and list its files again if one of them is
        gone."""
        self._oldest = None
        if self.files is not None and known.oldest_file is not None and not known.oldest_file.exists():
            self.files.expire()

    async def _learn(
        self, queue: tuple[str, int], command: RemotingCommand, upstream: Upstream, earlier: _Known | None
    ) -> _Known:
        """Read the state of a queue (topic and queue id) from the broker's files, or by requests if these cannot be
        read, and cache it. ``earlier``: the state before, which shows how many messages the broker deletes at a
        time."""
        known = None
        if self.files is not None:
            loop = asyncio.get_running_loop()
            known = await loop.run_in_executor(
                self.executor, _by_files, self.files, *queue, self.clock.monotonic_s(), earlier
            )
        if known is None or known.side is BrokerSide.UNREADABLE:
            known = await self._by_request(command, upstream)
        if earlier is not None:
            both = earlier.queue is not None and known.queue is not None
            step = known.queue.min_offset - earlier.queue.min_offset if both else 0  # type: ignore[union-attr]
            known = replace(known, margin=next_deletion_margin(earlier.margin, step))
        self._known.put(queue, known, QUEUE_BYTES + sys.getsizeof(queue[0]))
        return known

    # -- requests to the broker ------------------------------------------------------------------------------------

    async def _by_request(self, command: RemotingCommand, upstream: Upstream) -> _Known:
        """Return the state of the queue that ``command`` names, from up to five requests over the client's connection
        to the broker. If the broker does not answer, the state says so (AWAY)."""
        now_s = self.clock.monotonic_s()
        try:
            minimum = await query_offset(command, upstream, RequestCode.GET_MIN_OFFSET)
            maximum = await query_offset(command, upstream, RequestCode.GET_MAX_OFFSET)
            self._oldest = None  # never older than the minimum
            oldest = await self._oldest_phys(command, upstream)
            if minimum is None or maximum is None:
                return _Known(BrokerSide.UNREPORTED, now_s, now_s, oldest_phys=oldest)
            if minimum < 0 or maximum <= 0:
                return _Known(BrokerSide.READABLE, now_s, now_s, oldest_phys=oldest)
            queue = HeldOffsets(min(minimum, maximum), maximum)
            first = await query_phys(command, upstream, queue.min_offset)
            last = await query_phys(command, upstream, maximum - 1)
        except UnavailableError:
            return _Known(BrokerSide.AWAY, now_s, now_s)
        return _Known(BrokerSide.READABLE, now_s, now_s, queue, first, last, oldest)

    async def _oldest_phys(self, command: RemotingCommand, upstream: Upstream) -> int:
        """Return the physical offset at which the broker's log begins, at most ``keep_s`` old. If the broker does not
        say, it is UNKNOWN_PHYS, so that the archive counts as behind."""
        now_s = self.clock.monotonic_s()
        if self._oldest is not None and now_s - self._oldest[0] < self.keep_s:
            return self._oldest[1]
        oldest = None
        if self.files is not None:
            loop = asyncio.get_running_loop()
            file = await loop.run_in_executor(self.executor, self.files.oldest_file)
            oldest = file.begin_phys if file is not None else None
        if oldest is None:
            oldest = await query_log_begin(command, upstream)
        self._oldest = now_s, oldest
        return oldest


def _queue_of(command: RemotingCommand) -> tuple[str, int]:
    return command.ext_fields["topic"], int(command.ext_fields["queueId"])


def _by_files(files: BrokerFiles, topic: str, queue_id: int, now_s: float, earlier: _Known | None) -> _Known:
    try:
        return _looked_up(files, topic, queue_id, now_s, earlier)
    except TieredError:
        return _Known(BrokerSide.UNREADABLE, now_s, now_s)  # damaged, or being written


def _looked_up(files: BrokerFiles, topic: str, queue_id: int, now_s: float, earlier: _Known | None) -> _Known:
    """Return the state of a queue from the broker's files: its first and last message, and the first offset that the
    broker keeps when it deletes its oldest file. ``earlier``: the state before, which may have this offset already."""
    view = files.local_view(topic, queue_id, 0)
    oldest = view.oldest_phys
    if view.queue is None or view.queue.max_offset <= view.queue.min_offset:
        return _Known(view.side, now_s, now_s, view.queue, last_phys=view.last_phys, oldest_phys=oldest)
    low, high = view.queue.min_offset, view.queue.max_offset
    first = view if low == 0 else files.local_view(topic, queue_id, low)
    last = first if high - 1 == low else files.local_view(topic, queue_id, high - 1)
    file = files.oldest_file()
    if file is None or last.phys < file.end_phys or first.phys >= file.end_phys:
        kept_from = low  # in one file only, of which a broker keeps the newest, or not in the oldest one
    elif earlier is not None and earlier.oldest_phys == oldest and earlier.kept_from:
        kept_from = earlier.kept_from
    else:
        kept_from = files.offset_from(topic, queue_id, file.end_phys)
        if kept_from >= high:
            kept_from = low
    path = file.path if file is not None and file.begin_phys == oldest else None
    return _Known(view.side, now_s, now_s, view.queue, first.phys, last.phys, oldest, path, kept_from)


def _view(known: _Known, offset: int) -> LocalView:
    """Return what the read policy needs of a queue's cached state to decide where ``offset`` is read."""
    queue = known.queue
    if queue is None or offset not in queue:
        return LocalView(known.side, queue, oldest_phys=known.oldest_phys, last_phys=known.last_phys)
    # Compared with the archive's, the first record's position in the log shows as well as that of the record at
    # ``offset`` whether the topic was deleted and recreated, which begins a generation.
    leaving = offset < known.kept_from or is_expiring(offset, queue, known.margin)
    return LocalView(known.side, queue, True, known.first_phys, known.oldest_phys, known.last_phys, leaving)


@dataclass(frozen=True)
class QueueState:
    """The broker's side of the queue that ``command`` names; see read_router.BrokerSource."""

    views: BrokerViews
    command: RemotingCommand
    upstream: Upstream
    offset: int

    async def local_view(self) -> LocalView:
        return await self.views.local_view(self.command, self.upstream, self.offset)

    async def residency(self) -> Residency:
        return Residency.NOT_CHECKED
