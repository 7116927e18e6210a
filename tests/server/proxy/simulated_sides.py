"""Broker, its files and the archive as the proxy meets them, played over one world.

The broker answers as DefaultMessageStore.getMessage does, record by record, its consume queues behind its commitlog;
while a caller waits, things happen. Owns these answers.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

from fetcher.policy.read_policy import BrokerSide, HeldOffsets, LocalView, Residency
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from fetcher.rows.run_list import status_at
from rocketmq_tiered.server.backend.backend import Bounds
from tests.server.proxy.simulated_broker import (
    FILE_BYTES,
    QUEUE_FILE_UNITS,
    PlayedFile,
    PlayedPath,
    Version,
    World,
)
from tiered.errors import UnavailableError
from tiered.remoting.command import RemotingCommand
from tiered.remoting.command import RequestCode as R


class Inline(Executor):
    """Runs in the thread that asks."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **named))
        return future


class PlayedFiles:
    """As BrokerFiles: directories are listed now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._listed_s, self._listed = -1e9, 0

    def _oldest(self) -> int:
        if self._world.time_s - self._listed_s >= 1.0:
            self._listed_s, self._listed = self._world.time_s, self._world.oldest
        return self._listed

    def local_view(self, topic: str, queue_id: int, offset: int) -> LocalView:
        world, oldest = self._world, self._oldest()
        if not world.rows:
            return LocalView(BrokerSide.READABLE, oldest_phys=oldest)
        high = len(world.rows)
        low = next((n for n, row in enumerate(world.rows) if row.phys >= oldest), high)
        phys = world.rows[offset].phys if offset < high else -1
        last = world.rows[-1].phys
        return LocalView(BrokerSide.READABLE, HeldOffsets(low, high), phys >= oldest, phys, oldest, last)

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
    """An Backend for pulls: by the version known, or a newer one where that says more."""

    def __init__(self, world: World, *, is_filtered: bool) -> None:
        self._world, self._is_filtered = world, is_filtered

    async def pull(self, wish: PullRequest) -> PullResult:
        world = self._world
        await asyncio.sleep(0)
        world.tick()
        view, offset = world.state, wish.offset
        status, after = self._standing(view, offset)
        if status is not PullStatus.FOUND and status is not PullStatus.OFFSET_TOO_SMALL:
            if not world.is_store_away:
                world.known = len(world.versions) - 1
            elif status is PullStatus.OFFSET_OVERFLOW_BADLY:
                raise UnavailableError("the object store is away")
            view = world.state
            status, after = self._standing(view, offset)
        bounds = Bounds(view.low, view.high)
        if status is not PullStatus.FOUND:
            return PullResult(status, after, *bounds)
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
        status = PullStatus.FOUND if body else PullStatus.NO_MATCHED_MESSAGE
        return PullResult(status, at, *bounds, body, len(body))

    def _standing(self, view: Version, offset: int) -> tuple[PullStatus, int]:
        if view.high == 0:
            return PullStatus.NO_MATCHED_LOGIC_QUEUE, offset
        bounds: Any = type("Bounds", (), {"min_offset": view.low, "max_offset": view.high})
        return status_at(bounds, offset)

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(0)
        self._world.time_s += timeout_s
        self._world.tick()
