"""A broker's answers as its source writes them, over real frames, with what it holds changed at will.

Pulls (DefaultMessageStore.getMessage, PullMessageProcessor), bounds, times, messages by id and key, commits. What a
story needs to happen in between is done by ``before`` and ``after``: called with the command that is being answered.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from tests.fetcher.broker_store_writer import WrittenStore
from tiered.remoting.command import FrameDecoder, RemotingCommand, encode
from tiered.remoting.command import RequestCode as R

FOUND, NOT_FOUND, RETRY, MOVED = 0, 19, 20, 21


def phys_of(record: bytes) -> int:
    """Physical offset."""
    return int.from_bytes(record[28:36], "big")


def stored_ms_of(record: bytes) -> int:
    """Store time; born hosts are IPv4 here."""
    return int.from_bytes(record[56:64], "big")


class ScriptedBroker:
    """Serves what ``store`` was given, from ``minimum`` on."""

    def __init__(self, store: WrittenStore) -> None:
        self.store = store
        self.minimum: dict[tuple[str, int], int] = {}
        self.lost: dict[tuple[str, int], int] = {}
        """Below: deleted a moment ago, the consue queue's minimum does not know yet."""
        self.requests: list[RemotingCommand] = []
        self.commits: list[int] = []
        self.before: Callable[[RemotingCommand], None] = lambda command: None
        self.refuses: dict[int, tuple[int, str]] = {}
        """Request code to (code, remark)."""
        self.says: dict[int, RemotingCommand] = {}
        """Request code to its answer."""
        self.silent: set[int] = set()
        self.tag = ""
        """The only tag its consumers subscribed to."""
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._grown = asyncio.Event()

    def codes(self) -> list[int]:
        """The requests, in order."""
        return [command.code for command in self.requests]

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def kill(self) -> None:
        """As kill -9: connections end, new ones are refused."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    def grow(self) -> None:
        """Long polls look again."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        decoder, tasks = FrameDecoder(), set()
        while data := await reader.read(1 << 16):
            for command in decoder.feed(data):
                task = asyncio.create_task(self._handle(command, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()
        writer.close()

    async def _handle(self, command: RemotingCommand, writer: asyncio.StreamWriter) -> None:
        self.requests.append(command)
        self.before(command)
        if command.code in self.silent:
            return
        answer = await self.answer(command)
        if not command.is_oneway:
            writer.write(encode(replace(answer, opaque=command.opaque, flag=1, version=477)))

    # -- what it has ------------------------------------------------------------------------------------------

    def queue(self, fields: dict[str, str]) -> tuple[dict[int, bytes], int, int, int]:
        """(records, minimum, maximum, below this they are lost)."""
        place = fields["topic"], int(fields["queueId"])
        records = self.store.records.get(place, {})
        maximum = max(records, default=-1) + 1
        minimum = min(self.minimum.get(place, 0), maximum)
        return records, minimum, maximum, max(minimum, self.lost.get(place, 0))

    async def answer(self, command: RemotingCommand) -> RemotingCommand:
        code, fields = command.code, dict(command.ext_fields)
        if code in self.refuses:
            refused, remark = self.refuses[code]
            return RemotingCommand(refused, 0, remark=remark)
        if code in self.says:
            return self.says[code]
        if code in (R.PULL_MESSAGE, R.LITE_PULL_MESSAGE):
            return await self._pull(fields)
        if code == R.UPDATE_CONSUMER_OFFSET:
            self.commits.append(int(fields["commitOffset"]))
            return RemotingCommand(0, 0)
        if code == R.GET_BROKER_RUNTIME_INFO:
            oldest = min(
                (
                    phys_of(records[number])
                    for (place, records) in self.store.records.items()
                    for number in records
                    if number >= max(self.minimum.get(place, 0), self.lost.get(place, 0))
                ),
                default=0,
            )
            return RemotingCommand(0, 0, body=b'{"table":{"commitLogMinOffset":"%d"}}' % oldest)
        if code in (R.VIEW_MESSAGE_BY_ID, R.QUERY_MESSAGE):
            return self._lookup(code, fields)
        records, minimum, maximum, _ = self.queue(fields)
        if code == R.GET_MIN_OFFSET:
            return RemotingCommand(0, 0, ext_fields={"offset": str(minimum if records else -1)})
        if code == R.GET_MAX_OFFSET:
            return RemotingCommand(0, 0, ext_fields={"offset": str(maximum)})
        if code == R.GET_EARLIEST_MSG_STORETIME:
            time_ms = stored_ms_of(records[minimum]) if minimum < maximum else -1
            return RemotingCommand(0, 0, ext_fields={"timestamp": str(time_ms)})
        if code == R.SEARCH_OFFSET_BY_TIMESTAMP:
            wanted = int(fields["timestamp"])
            kept = list(range(minimum, maximum))
            if fields.get("boundaryType") == "UPPER":
                found = max((n for n in kept if stored_ms_of(records[n]) <= wanted), default=0)
            else:
                found = min((n for n in kept if stored_ms_of(records[n]) >= wanted), default=maximum)
            return RemotingCommand(0, 0, ext_fields={"offset": str(found)})
        if code == R.QUERY_CONSUME_QUEUE:
            record = records.get(int(fields["index"])) if minimum <= int(fields["index"]) else None
            row = f'{{"physicOffset":{phys_of(record)}}}' if record is not None else ""
            body = f'{{"maxQueueIndex":{maximum},"minQueueIndex":{minimum},"queueData":[{row}]}}'
            return RemotingCommand(0, 0, body=body.encode())
        return RemotingCommand(3, 0, remark="not supported")

    def _lookup(self, code: int, fields: dict[str, str]) -> RemotingCommand:
        kept = [
            record
            for place, records in self.store.records.items()
            for number, record in records.items()
            if number >= self.minimum.get(place, 0)
        ]
        if code == R.VIEW_MESSAGE_BY_ID:
            found = [record for record in kept if phys_of(record) == int(fields["offset"])]
            return RemotingCommand(0 if found else 1, 0, body=b"".join(found))
        if "key" not in fields:
            return RemotingCommand(1, 0, remark="the custom field <key> is null")
        key = fields["key"].encode()
        found = [record for record in reversed(kept) if key in record][: int(fields.get("maxNum", 32))]
        ext = {"indexLastUpdateTimestamp": "5", "indexLastUpdatePhyoffset": "6"}
        return RemotingCommand(0 if found else 22, 0, ext_fields=ext, body=b"".join(found))

    async def _pull(self, fields: dict[str, str]) -> RemotingCommand:
        flags, offset = int(fields["sysFlag"]), int(fields["queueOffset"])
        if flags & 1:
            self.commits.append(int(fields["commitOffset"]))
        if flags & 2 and offset == self.queue(fields)[2] and offset:
            try:
                async with asyncio.timeout(int(fields["suspendTimeoutMillis"]) / 1000):
                    await self._grown.wait()
            except TimeoutError:
                return self._said(NOT_FOUND, "OFFSET_OVERFLOW_ONE", offset, fields)
        records, minimum, maximum, kept_from = self.queue(fields)
        if not records:
            code = NOT_FOUND if offset == 0 else MOVED
            return self._said(code, "NO_MATCHED_LOGIC_QUEUE", 0, fields)
        if offset < minimum:
            return self._said(MOVED, "OFFSET_TOO_SMALL", minimum, fields)
        if offset == maximum:
            return self._said(NOT_FOUND, "OFFSET_OVERFLOW_ONE", offset, fields)
        if offset > maximum:
            return self._said(MOVED, "OFFSET_OVERFLOW_BADLY", maximum, fields)
        body, number = b"", offset
        left = int(fields["maxMsgNums"])
        while number < maximum and left:
            if number >= kept_from and (not self.tag or b"TAGS\x01" + self.tag.encode() in records[number]):
                body += records[number]
                left -= 1
            number += 1
        if body:
            return self._said(FOUND, "FOUND", number, fields, body)
        remark = "MESSAGE_WAS_REMOVING" if kept_from > offset else "NO_MATCHED_MESSAGE"
        return self._said(RETRY, remark, number, fields)

    def _said(
        self, code: int, remark: str, next_offset: int, fields: dict[str, str], body: bytes = b""
    ) -> RemotingCommand:
        _, minimum, maximum, _ = self.queue(fields)
        ext = {
            "suggestWhichBrokerId": "3",
            "nextBeginOffset": str(next_offset),
            "minOffset": str(minimum),
            "maxOffset": str(maximum),
            "topicSysFlag": "0",
        }
        return RemotingCommand(code, 0, remark=remark, ext_fields=ext, body=body)
