"""The load of benchmarks/hostile.py: ``python -m benchmarks.hostile_load ADDRESS --seconds N``.

20 clients that pull with the worst filters allowed and with longer ones, 24 threads that send hostile frames, and 200
consumers that join and leave, all as fast as they are answered. Prints the rates, as JSON. Owns the attacks.
"""

import argparse
import contextlib
import itertools
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from tiered.remoting.command import RemotingCommand, encode

TOPIC = "Bench0000"
FILTER_CLIENTS, HOSTILE_THREADS, CONSUMERS, CONSUMER_THREADS = 20, 24, 200, 8
PAUSE_S = 0.01
STAY_S = 0.5
TIMEOUT_S = 5.0

_numbers = itertools.count()


class Load:
    """What is sent to one address until ``stop``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, float]:
        """Rates by kind, in 1/s."""
        work: list[tuple[Callable[..., None], int]] = [(self._filters, n) for n in range(FILTER_CLIENTS)]
        work += [(self._hostile, n) for n in range(HOSTILE_THREADS)]
        work += [(self._consumers, n) for n in range(CONSUMER_THREADS)]
        threads = [threading.Thread(target=self._forever, args=one, daemon=True) for one in work]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self.stop.set()
        return {kind: round(count / seconds, 1) for kind, count in sorted(self.counts.items())}

    def _count(self, kind: str) -> None:
        with self._lock:
            self.counts[kind] += 1

    def _forever(self, work: Callable[[int], None], number: int) -> None:
        while not self.stop.is_set():
            with contextlib.suppress(OSError):  # the server closes hostile connections
                work(number)
            self.stop.wait(PAUSE_S)

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, TIMEOUT_S)

    def _filters(self, number: int) -> None:
        with self._connect() as client:
            for turn in range(20):
                if self.stop.is_set():
                    return
                client.sendall(_pull(_filter(turn, number)))
                _read_frame(client)
                self._count("filtered pulls")

    def _hostile(self, number: int) -> None:
        kind, send = ATTACKS[number % len(ATTACKS)]
        with self._connect() as client:
            send(client, self.stop)
            self._count(kind)
            client.settimeout(1.0)
            client.recv(1 << 16)

    def _consumers(self, number: int) -> None:
        """Its share of the consumers: they join, learn of each other, and leave without a word."""
        clients = []
        try:
            for _ in range(CONSUMERS // CONSUMER_THREADS):
                client = self._connect()
                clients.append(client)
                client.sendall(encode(RemotingCommand(34, 1, body=_heartbeat(next(_numbers)))))
                client.sendall(encode(RemotingCommand(38, 2, ext_fields={"consumerGroup": "crowd"})))
                self._count("joins")
            self.stop.wait(STAY_S)
        finally:
            for client in clients:
                client.close()


def _pull(subscription: str) -> bytes:
    fields = {
        "consumerGroup": f"g{next(_numbers)}",
        "topic": TOPIC,
        "queueId": "0",
        "queueOffset": "0",
        "maxMsgNums": "32",
        "sysFlag": "4",
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subscription": subscription,
        "subVersion": "0",
        "expressionType": "SQL92",
    }
    return encode(RemotingCommand(11, next(_numbers) % 1_000_000, ext_fields=fields))


def _filter(turn: int, client: int) -> str:
    """Most terms allowed, each with a property of its own; one in ten has 60 KB."""
    terms = 5_000 if turn % 10 == 9 else 250
    mark = f"{client}x{next(_numbers)}"
    return " OR ".join(f"p{mark}y{number}>1" for number in range(terms))[: 60_000 if terms > 250 else None]


def _heartbeat(number: int) -> bytes:
    subscription = {"topic": TOPIC, "subString": "*", "expressionType": "TAG", "subVersion": 1}
    data = {"groupName": "crowd", "consumeType": "CONSUME_PASSIVELY", "subscriptionDataSet": [subscription]}
    return json.dumps({"clientID": f"c{number}", "consumerDataSet": [data]}).encode()


def _read_frame(client: socket.socket) -> None:
    left = 4 + int.from_bytes(_exactly(client, 4), "big") - 4
    _exactly(client, left)


def _exactly(client: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        data = client.recv(count - len(parts))
        if not data:
            raise ConnectionError
        parts += data
    return bytes(parts)


def _framed(header: bytes, body: bytes = b"") -> bytes:
    head = len(header).to_bytes(4, "big")
    return (4 + len(header) + len(body)).to_bytes(4, "big") + head + header + body


def _half_frame(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(_framed(b"x" * 60_000)[:30_000])


def _oversized_length(client: socket.socket, stop: threading.Event) -> None:
    client.sendall((0x7FFF_FFFF).to_bytes(4, "big") + b"x" * 1000)


def _garbage(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(random.randbytes(65_536))


def _deep_json(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(_framed(b'{"code":11,"opaque":1,"extFields":{"a":' + b"[" * 200_000))


def _wide_json(client: socket.socket, stop: threading.Event) -> None:
    fields = b",".join(b'"%d":1' % number for number in range(20_000))
    client.sendall(_framed(b'{"code":11,"opaque":1,"extFields":{' + fields + b"}}"))


def _slow_sender(client: socket.socket, stop: threading.Event) -> None:
    for byte in _framed(b"x" * 100):
        if stop.wait(0.02):
            return
        client.sendall(bytes([byte]))


def _large_heartbeats(client: socket.socket, stop: threading.Event) -> None:
    groups = ",".join(f'{{"groupName":"g{number}"}}' for number in range(4_000))
    body = f'{{"clientID":"h","consumerDataSet":[{groups}]}}'.encode()
    for opaque in range(4):
        client.sendall(encode(RemotingCommand(34, opaque, body=body)))


def _large_bodies(client: socket.socket, stop: threading.Event) -> None:
    client.sendall(encode(RemotingCommand(46, 1, body=b"{" + b"x" * 15_000_000)))


ATTACKS: list[tuple[str, Callable[[socket.socket, threading.Event], None]]] = [
    ("half frames", _half_frame),
    ("oversized lengths", _oversized_length),
    ("garbage", _garbage),
    ("deep JSON", _deep_json),
    ("wide JSON", _wide_json),
    ("slow senders", _slow_sender),
    ("large heartbeats", _large_heartbeats),
    ("large bodies", _large_bodies),
]


def main() -> int:
    """Send for some seconds, and print the rates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile_load", description=main.__doc__)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    print(json.dumps(Load(options.address).run(options.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
