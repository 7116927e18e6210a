"""A broker, its uploader, an archive and one consumer between them, in one thread: whatever happens happens while
somebody waits.

Real are the façade's pulls, the read policy and what is remembered of the broker. Played are the broker
(DefaultMessageStore.getMessage, record by record, its consume queues behind its commitlog), its files, the catalog,
which is known late, and time. Owns that world and what the consumer checks; tests say which schedules it lives through.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from fetcher.batch import GetStatus
from fetcher.policy.archived_queues import ArchivedQueue
from fetcher.policy.policy_line import PolicyLine
from fetcher.policy.read_policy import BrokerSide, LocalView, OffsetRange, Residency
from fetcher.pulls.queue_view import standing
from fetcher.serving.archive_side import Bounds, PullFound, PullStatus, PullWish
from fetcher.serving.facade.broker_view import BrokerViews
from fetcher.serving.facade.pull import FacadePulls
from fetcher.serving.facade.pull_sides import PullContext
from fetcher.serving.pull import SUSPEND, PullLimits
from fetcher.serving.session import Subscription
from fetcher.serving.wire.codes import RequestCode as R
from tests.end_to_end.offloading import FILTER
from tests.fetcher.serving.serving_peer import request
from tests.kernels.record_builder import Message, encode
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.settings.sections import ReadSettings

RECORD_BYTES, FILE_RECORDS = 200, 8
FILE_BYTES = RECORD_BYTES * FILE_RECORDS
QUEUE_FILE_UNITS = 10
COUNT = 6


@dataclass(frozen=True)
class Row:
    """A message of the queue at physical offset ``phys``."""

    phys: int
    is_tagged: bool
    record: bytes


@dataclass(frozen=True)
class Version:
    """What one catalog version says of the queue, and of the log."""

    number: int
    low: int = 0
    high: int = 0
    end_phys: int = 0
    dispatched: int = 0
    first_phys: int = 0
    gaps: tuple[tuple[int, int], ...] = ()

    def existing(self, offset: int) -> int:
        """See QueueView.existing."""
        for begin, end in self.gaps:
            if begin <= offset < end:
                offset = end
        return offset


@dataclass(frozen=True)
class PlayedPath:
    """A commitlog file's."""

    world: World
    begin: int

    def exists(self) -> bool:
        """Whether the broker still has it."""
        return self.begin >= self.world.oldest


@dataclass(frozen=True)
class PlayedFile:
    """As LogFile."""

    begin_phys: int
    path: PlayedPath

    @property
    def end_phys(self) -> int:
        return self.begin_phys + FILE_BYTES


class Inline(Executor):
    """Runs in the thread that asks."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


@dataclass(eq=False)
class World:
    """``rows``: every message ever sent, by offset. ``oldest``: where the broker's log begins; ``queue_low``: what its
    consume queue says is the first, which learns of deletions late. ``is_pinned``: the uploader keeps what is deleted.
    ``tells``: the broker answers more than pulls."""

    rand: random.Random
    begins_late: bool = False
    is_pinned: bool = True
    rows: list[Row] = field(default_factory=list)
    phys: int = 0
    oldest: int = 0
    queue_low: int = 0
    versions: list[Version] = field(default_factory=lambda: [Version(0)])
    known: int = 0
    time_s: float = 0.0
    is_broker_away: bool = False
    is_store_away: bool = False
    is_quiet: bool = False
    deletes: bool = True
    tells: bool = True

    # -- what happens -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Perhaps something happens; time goes by."""
        if self.is_quiet:
            return
        rand = self.rand
        self.time_s += rand.choice([0.0, 0.001, 0.05, 0.3])
        happens = rand.random()
        if happens < 0.25:
            self.send(rand.randrange(1, 6))
        elif happens < 0.40 and self.deletes:
            self.delete(rand.choice([1, 1, 1, 2, 4]))
        elif happens < 0.50:
            self.queue_low = self.true_low()
        elif happens < 0.68:
            self.offload()
        elif happens < 0.72:
            self.expire()
        elif happens < 0.80:
            self.known = rand.randrange(self.known, len(self.versions))
        elif happens < 0.83:
            self.is_broker_away = rand.random() < 0.5
        elif happens < 0.86:
            self.is_store_away = rand.random() < 0.5

    def send(self, count: int) -> None:
        """Some messages, and some of other queues between them."""
        for _ in range(count):
            if self.rand.random() < 0.4:
                self.phys += RECORD_BYTES * self.rand.choice([1, 1, 3, 2 * FILE_RECORDS])
            number = len(self.rows)
            record = encode(Message(b"t", 0, number, b"%d" % number), self.phys)
            self.rows.append(Row(self.phys, self.rand.random() < 0.5, record))
            self.phys += RECORD_BYTES

    def delete(self, count: int) -> None:
        """The broker lets go of its oldest files, but never of the last."""
        last = max(0, self.phys - 1) // FILE_BYTES * FILE_BYTES
        self.oldest = min(last, self.oldest + count * FILE_BYTES)

    def offload(self, is_all: bool = False) -> None:
        """The uploader gets on: what the broker has deleted it has by its pins, or records as a gap."""
        before = self.versions[-1]
        begin = before.dispatched
        if before.number == 0 and self.begins_late:
            begin = max(begin, self.oldest)
        files = self.rand.randrange(1, 12)
        end = self.phys if is_all else min(self.phys, begin + files * RECORD_BYTES)
        rows = [(number, row) for number, row in enumerate(self.rows) if begin <= row.phys < end]
        if not rows:
            self.versions.append(replace(before, number=before.number + 1, dispatched=max(begin, end)))
            return
        is_first = before.high == before.low == 0
        low = rows[0][0] if is_first else before.low
        gaps = list(before.gaps)
        for number, row in rows:
            if row.phys < self.oldest and not self.is_pinned:
                if gaps and gaps[-1][1] == number:
                    gaps[-1] = gaps[-1][0], number + 1
                else:
                    gaps.append((number, number + 1))
        first_phys = rows[0][1].phys if is_first else before.first_phys
        last, row = rows[-1]
        end_phys = row.phys + RECORD_BYTES
        self.versions.append(
            Version(before.number + 1, low, last + 1, end_phys, end, first_phys, tuple(gaps))
        )

    def expire(self) -> None:
        """The archive's retention, which never takes what the broker has."""
        before = self.versions[-1]
        low = min(before.high, self.true_low(), before.low + self.rand.randrange(0, 5))
        if low > before.low:
            self.versions.append(replace(before, number=before.number + 1, low=low))

    # -- what is true -----------------------------------------------------------------------------------------

    def true_low(self) -> int:
        """The first offset whose record the broker has."""
        return next((n for n, row in enumerate(self.rows) if row.phys >= self.oldest), len(self.rows))

    def is_to_come(self, number: int) -> bool:
        """Whether somebody has the message, or will."""
        newest, row = self.versions[-1], self.rows[number]
        in_gap = newest.existing(number) != number
        if row.phys >= self.oldest or (newest.low <= number < newest.high and not in_gap):
            return True
        was_before = self.begins_late and (newest.number == 0 or row.phys < newest.first_phys)
        return not was_before and row.phys >= newest.dispatched  # pinned, or about to be recorded as lost

    # -- as the façade sees it --------------------------------------------------------------------------------

    @property
    def state(self) -> Version:
        """See KnownCatalog."""
        return self.versions[self.known]

    def look(self) -> None:
        """See KnownCatalog."""


class PlayedFiles:
    """As HotReader: directories are listed now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._listed_s, self._listed = -1e9, 0

    def _oldest(self) -> int:
        if self._world.time_s - self._listed_s >= 1.0:
            self._listed_s, self._listed = self._world.time_s, self._world.oldest
        return self._listed

    def look(self, topic: str, queue_id: int, offset: int) -> LocalView:
        world, oldest = self._world, self._oldest()
        if not world.rows:
            return LocalView(BrokerSide.READABLE, oldest_phys=oldest)
        high = len(world.rows)
        low = next((n for n, row in enumerate(world.rows) if row.phys >= oldest), high)
        phys = world.rows[offset].phys if offset < high else -1
        last = world.rows[-1].phys
        return LocalView(BrokerSide.READABLE, OffsetRange(low, high), phys >= oldest, phys, oldest, last)

    def oldest_file(self) -> PlayedFile:
        begin = self._oldest()
        return PlayedFile(begin, PlayedPath(self._world, begin))

    def offset_from(self, topic: str, queue_id: int, phys: int) -> int:
        rows = self._world.rows
        return next((n for n, row in enumerate(rows) if row.phys >= max(phys, self._oldest())), len(rows))

    def expire(self) -> None:
        self._listed_s = -1e9

    def residency(self, *arguments: Any, **named: Any) -> Residency:
        return self._world.rand.choice([Residency.COLD, Residency.RESIDENT, Residency.UNKNOWN])


class PlayedBroker:
    """An Upstream: the broker at its other end."""

    def __init__(self, world: World, *, is_filtered: bool) -> None:
        self._world, self._is_filtered = world, is_filtered

    async def send(self, command: RemotingCommand) -> None:
        await self._wait()

    async def call(self, command: RemotingCommand, timeout_s: float) -> RemotingCommand:
        await self._wait()
        world, fields = self._world, command.ext_fields
        if command.code == R.PULL_MESSAGE:
            answer = await self._pull(int(fields["queueOffset"]), int(fields["maxMsgNums"]))
        elif not world.tells:
            answer = RemotingCommand(16, 0, remark="no permission")
        elif command.code == R.GET_MIN_OFFSET:
            answer = _answer(offset=world.queue_low if world.rows else -1)
        elif command.code == R.GET_MAX_OFFSET:
            answer = _answer(offset=len(world.rows))
        elif command.code == R.GET_BROKER_RUNTIME_INFO:
            answer = RemotingCommand(0, 0, body=b'{"table":{"commitLogMinOffset":"%d"}}' % world.oldest)
        else:
            number = int(fields["index"])
            is_there = world.queue_low <= number < len(world.rows)
            row = b'{"physicOffset":%d}' % world.rows[number].phys if is_there else b""
            answer = RemotingCommand(0, 0, body=b'{"maxQueueIndex":9,"queueData":[%s]}' % row)
        await self._wait()
        return answer

    async def _wait(self) -> None:
        await asyncio.sleep(0)
        self._world.tick()
        if self._world.is_broker_away:
            raise UnavailableError("away")

    async def _pull(self, offset: int, count: int) -> RemotingCommand:
        world = self._world
        for _ in range(3):  # long polling
            if offset != len(world.rows):
                break
            await self._wait()
        low, high = world.queue_low, len(world.rows)

        def said(code: int, next_offset: int, body: bytes = b"") -> RemotingCommand:
            return replace(
                _answer(nextBeginOffset=next_offset, minOffset=low, maxOffset=high), code=code, body=body
            )

        if not high:
            return said(19 if offset == 0 else 21, 0)
        if offset < low:
            return said(21, low)
        if offset >= high:
            return said(19, offset) if offset == high else said(21, high)
        world.tick()
        file_end = (offset // QUEUE_FILE_UNITS + 1) * QUEUE_FILE_UNITS
        if file_end <= world.true_low() and world.rand.random() < 0.5:
            return said(19, file_end)  # OFFSET_FOUND_NULL: the consume queue's file is gone, too
        body, number, skip_to = b"", offset, -1
        while number < high and count:
            if world.rand.random() < 0.2:
                world.tick()
            row = world.rows[number]
            number += 1
            if row.phys < skip_to or (self._is_filtered and not row.is_tagged):
                continue
            if row.phys < world.oldest:
                skip_to = (row.phys // FILE_BYTES + 1) * FILE_BYTES
                continue
            body, count = body + row.record, count - 1
        return said(0, number, body) if body else said(20, number)


def _answer(**fields: int) -> RemotingCommand:
    return RemotingCommand(0, 0, ext_fields={name: str(value) for name, value in fields.items()}, version=477)


class PlayedArchive:
    """An ArchiveSide for pulls: by the version known, or a newer one where that says more."""

    def __init__(self, world: World, *, is_filtered: bool) -> None:
        self._world, self._is_filtered = world, is_filtered

    async def pull(self, wish: PullWish) -> PullFound:
        world = self._world
        await asyncio.sleep(0)
        world.tick()
        view, offset = world.state, wish.offset
        status, after = self._standing(view, offset)
        if status is not GetStatus.FOUND and status is not GetStatus.OFFSET_TOO_SMALL:
            if not world.is_store_away:
                world.known = len(world.versions) - 1
            elif status is GetStatus.OFFSET_OVERFLOW_BADLY:
                raise UnavailableError("the object store is away")
            view = world.state
            status, after = self._standing(view, offset)
        bounds = Bounds(view.low, view.high)
        if status is not GetStatus.FOUND:
            return PullFound(PullStatus[status.name], after, bounds)
        if world.is_store_away and world.rand.random() < 0.7:
            raise UnavailableError("the object store is away")
        at = begin = view.existing(offset)
        body: list[bytes] = []
        while at < view.high and view.existing(at) == at and len(body) < wish.count:
            row = world.rows[at]
            at += 1
            if row.is_tagged or not self._is_filtered:
                body.append(row.record)
        world.tick()
        if at == begin == offset:
            raise AssertionError(f"{offset} is in no run and in no gap")
        status = GetStatus.FOUND if body else GetStatus.NO_MATCHED_MESSAGE
        return PullFound(PullStatus[status.name], at, bounds, body, len(body))

    def _standing(self, view: Version, offset: int) -> tuple[GetStatus, int]:
        if view.high == 0:
            return GetStatus.NO_MATCHED_LOGIC_QUEUE, offset
        bounds: Any = type("Bounds", (), {"min_offset": view.low, "max_offset": view.high})
        return standing(bounds, offset)

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(0)
        self._world.time_s += timeout_s
        self._world.tick()


class SkippedError(AssertionError):
    """The consumer was moved past a message that somebody has, or will have."""


@dataclass
class Simulation:
    """One consumer, from ``start`` on."""

    world: World
    policy: str
    with_files: bool
    is_filtered: bool
    start: int = 0
    got: list[int] = field(default_factory=list)
    pulls: int = 0

    def __post_init__(self) -> None:
        world = self.world
        expression = "a" if self.is_filtered else "*"
        self._line = PolicyLine(world, ReadSettings(policy=self.policy), FILTER)  # type: ignore[arg-type]
        views = BrokerViews(
            PlayedFiles(world) if self.with_files else None,  # type: ignore[arg-type]
            executor=Inline(),
            clock_s=lambda: world.time_s,
        )
        archive = PlayedArchive(world, is_filtered=self.is_filtered)
        context = PullContext(
            archive,  # type: ignore[arg-type]
            views,
            Known(Subscription("t", expression)),
            now_s=lambda: world.time_s,
        )
        self._broker = PlayedBroker(world, is_filtered=self.is_filtered)
        self._pulls = FacadePulls(self._line, context, PullLimits(hold_s_max=3.0))
        self.offset = self.start

    async def pull(self) -> None:
        """One pull of the consumer, checked."""
        world, offset = self.world, self.offset
        ext = {
            "topic": "t", "queueId": 0, "queueOffset": offset, "consumerGroup": "g", "maxMsgNums": COUNT,
            "sysFlag": SUSPEND, "suspendTimeoutMillis": 2000, "commitOffset": 0, "subVersion": 0,
        }  # fmt: skip
        self.pulls += 1
        try:
            response = await self._pulls.pull(request(R.PULL_MESSAGE, **ext), self._broker)  # type: ignore[arg-type]
        except UnavailableError:
            return
        if response.code not in (0, 19, 20, 21):
            return
        next_offset = int(response.ext["nextBeginOffset"])
        found = _offsets(response.body)
        if found and response.code == 0:
            assert found[0] >= offset and found == sorted(set(found)), (offset, found)
        if next_offset < offset:
            raise SkippedError(f"sent back from {offset} to {next_offset} ({response.code})")
        for number in range(offset, min(next_offset, len(world.rows))):
            wanted = not self.is_filtered or world.rows[number].is_tagged
            if wanted and number not in found and world.is_to_come(number):
                raise SkippedError(
                    f"{number} of [{offset}, {next_offset}): {response.code} {response.remark}"
                )
        if next_offset > len(world.rows):
            raise SkippedError(f"{next_offset} is behind the end")
        self.got += found
        self.offset = next_offset

    async def run(self, pulls: int) -> None:
        """Some pulls while things happen; then nothing happens any more, and the consumer comes to the end."""
        for _ in range(pulls):
            self.world.tick()
            await self.pull()
        world = self.world
        world.is_broker_away = world.is_store_away = False
        world.is_quiet = True
        world.queue_low = world.true_low()
        world.offload(is_all=True)
        world.known = len(world.versions) - 1
        for _ in range(40 + len(world.rows)):
            world.time_s += 1.1
            await self.pull()
            if self.offset == len(world.rows):
                return
        raise SkippedError(f"stands at {self.offset} of {len(world.rows)}")


@dataclass
class Known:
    """See pull.Subscriptions."""

    known: Subscription

    def subscription(self, group: str, topic: str) -> Subscription:
        return self.known


def _offsets(body: Sequence[Any]) -> list[int]:
    data, found = b"".join(bytes(piece) for piece in body), []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(int.from_bytes(data[20:28], "big"))
        data = data[size:]
    return found


def archived_queue(version: Version, topic: str, queue_id: int) -> ArchivedQueue:
    """See archived_queues.archived_queue."""
    if version.high == 0:
        return ArchivedQueue(None, 0, version.dispatched)
    return ArchivedQueue(
        OffsetRange(version.low, version.high), version.end_phys, version.dispatched, version.first_phys
    )
