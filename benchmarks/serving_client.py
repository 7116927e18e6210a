"""A bare socket client that pulls and does not decode: ``python -m benchmarks.serving_client ADDRESS TOPIC …``.

The same one reads a broker and our server, so that what differs is the server. One connection a queue, one pull on its
way on each; or a thousand connections that request much and read slowly. Prints one JSON line. Owns the loops.
"""

import argparse
import json
import resource
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field

from benchmarks.machine import busy_core_s, others_cores, peak_rss_bytes, process_core_s
from benchmarks.report import Row
from tiered.remoting.command import RemotingCommand, SerializeType, decode, encode

PULL_MESSAGE, SUCCESS = 11, 0
SUBSCRIPTION_FLAG = 4
RECEIVE_BYTES = 4 * 1024 * 1024


def pull_frame(topic: str, queue_id: int, offset: int, batch: int, kind: SerializeType) -> bytes:
    """A pull as a Java pull consumer sends it."""
    fields = {
        "consumerGroup": "G_bare",
        "topic": topic,
        "queueId": str(queue_id),
        "queueOffset": str(offset),
        "maxMsgNums": str(batch),
        "sysFlag": str(SUBSCRIPTION_FLAG),
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subscription": "*",
        "subVersion": "0",
        "expressionType": "TAG",
    }
    command = RemotingCommand(
        PULL_MESSAGE,
        offset & 0x7FFFFFFF,
        language="JAVA",
        version=479,
        ext_fields=fields,
        serialize_type=kind,
    )
    return encode(command)


@dataclass
class Queue:
    """One connection that reads one queue."""

    connection: socket.socket
    queue_id: int
    offset: int = 0
    messages: int = 0
    times_s: list[float] = field(default_factory=list)


class BareClient:
    """Reads ``queues`` queues of ``topic`` in turns. ``end``: the offset at which a queue restarts."""

    def __init__(
        self, address: str, topic: str, queues: int, batch: int, end: int, kind: SerializeType
    ) -> None:
        self._topic, self._batch, self._end, self._kind = topic, batch, end, kind
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.queues = [Queue(connect(address), number) for number in range(queues)]

    def read_for(self, seconds: float) -> None:
        """Pull again and again."""
        deadline_s = time.perf_counter() + seconds
        while time.perf_counter() < deadline_s:
            self._round()

    def read_once(self) -> None:
        """Every queue from 0 to the end."""
        while any(queue.messages < self._end for queue in self.queues):
            self._round()

    def _round(self) -> None:
        began_s = time.perf_counter()
        for queue in self.queues:
            frame = pull_frame(self._topic, queue.queue_id, queue.offset, self._batch, self._kind)
            queue.connection.sendall(frame)
        for queue in self.queues:
            next_offset = self._answer(queue)
            queue.messages += next_offset - queue.offset
            queue.offset = next_offset if next_offset < self._end else 0
            queue.times_s.append(time.perf_counter() - began_s)

    def _answer(self, queue: Queue) -> int:
        received, wanted = 0, 4
        while received < wanted:
            count = queue.connection.recv_into(self._buffer[received:])
            if not count:
                raise EOFError("the server hung up")
            received += count
            if wanted == 4 and received >= 4:
                wanted = 4 + int(struct.unpack_from(">i", self._buffer)[0])
        header_bytes = int.from_bytes(self._buffer[5:8], "big")
        answer = decode(bytes(self._buffer[4 : 8 + header_bytes]))
        if answer.code != SUCCESS:
            raise ValueError(f"queue {queue.queue_id} at {queue.offset}: code {answer.code} {answer.remark}")
        return int(answer.ext_fields["nextBeginOffset"])


def connect(address: str) -> socket.socket:
    """A connection to ``host:port``."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def percentile_us(times_s: list[float], share: float) -> float | None:
    """The value below which ``share`` of ``times_s`` lie, in microseconds."""
    ordered = sorted(times_s)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e6, 1) if ordered else None


def measure(options: argparse.Namespace) -> Row:
    """Warm: ``seconds`` after as long a warm-up. Cold (``--once``): everything once."""
    kind = SerializeType.ROCKETMQ if options.binary else SerializeType.JSON
    client = BareClient(options.address, options.topic, options.queues, options.batch, options.end, kind)
    if not options.once:
        client.read_for(options.seconds)
    for queue in client.queues:
        queue.messages, queue.times_s = 0, []
    busy, own, began = busy_core_s(), time.process_time(), time.perf_counter()
    cpu_s = process_core_s(options.pid)
    if options.once:
        client.read_once()
    else:
        client.read_for(options.seconds)
    seconds = time.perf_counter() - began
    cpu_s = process_core_s(options.pid) - cpu_s
    times_s = [one for queue in client.queues for one in queue.times_s]
    return {
        "messages": sum(queue.messages for queue in client.queues),
        "seconds": round(seconds, 3),
        "pulls": len(times_s),
        "server_cpu_s": round(cpu_s, 2),
        "wrong": 0,
        "p50_us": percentile_us(times_s, 0.5),
        "p99_us": percentile_us(times_s, 0.99),
        "others_cores": others_cores(busy, cpu_s + time.process_time() - own, seconds),
    }


def read_slowly(options: argparse.Namespace) -> Row:
    """``--slow N`` connections ask ahead for 64 pulls each and read a few KiB every so often."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, options.slow + 256), hard))
    selector = selectors.DefaultSelector()
    for number in range(options.slow):
        connection = connect(options.address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        frames = [
            pull_frame(options.topic, number % options.queues, offset, options.batch, SerializeType.JSON)
            for offset in range(0, 64 * options.batch, options.batch)
        ]
        connection.sendall(b"".join(frames))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, connection)
    deadline_s, received_bytes, lost = time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < deadline_s:
        for key, _ in selector.select(timeout=0.1):
            connection = key.data
            try:
                data = connection.recv(4096)
            except OSError:
                data = b""
            received_bytes += len(data)
            if not data:
                selector.unregister(connection)
                lost += 1
        time.sleep(0.05)
    return {
        "connections": options.slow,
        "closed": lost,
        "received_bytes": received_bytes,
        "peak_rss_bytes": peak_rss_bytes(options.pid),
    }


def main() -> None:
    """Read, and print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_client", description=main.__doc__)
    parser.add_argument("address")
    parser.add_argument("topic")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--queues", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--end", type=int, required=True, help="offset at which a queue restarts")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--binary", action="store_true", help="ROCKETMQ headers instead of JSON")
    parser.add_argument("--slow", type=int, default=0, metavar="N", help="N connections that read slowly")
    options = parser.parse_args()
    print(json.dumps(read_slowly(options) if options.slow else measure(options)))


if __name__ == "__main__":
    main()
