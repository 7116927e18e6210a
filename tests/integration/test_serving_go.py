"""The Go client reads an archive whose broker is gone: a client that is not Java's."""

from __future__ import annotations

import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rocketmq_tiered
from tests.end_to_end.offloading import BROKER, backfill
from tests.servers.go_client import go_consumer
from tests.servers.install import NotInstallableError
from tests.servers.tiered_serve import tiered_serve
from tiered.object_store.file import FileStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@dataclass
class Served:
    """An archive, `tiered serve` over it, and the Go consumer."""

    program: Path
    directory: Path
    url: str
    address: str

    def consume(
        self, mode: str, topic: str, wanted: int, group: str, idle_s: int = 15
    ) -> list[tuple[str, ...]]:
        """What one consumer got, in order of arrival: the fields that main.go writes."""
        output = self.directory / f"{group}.txt"
        with rocketmq_tiered.open(self.url) as archive:
            queues = str(1 + max((queue.queue_id for queue in archive.queues(topic)), default=0))
        command = [
            str(self.program),
            mode,
            self.address,
            group,
            topic,
            str(wanted),
            str(idle_s),
            str(output),
            BROKER,
            queues,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return [tuple(line.split(" ")) for line in output.read_text("utf-8").splitlines()]

    def expected(self, topic: str) -> Counter[tuple[str, ...]]:
        """The same of every archived message."""
        with rocketmq_tiered.open(self.url) as archive:
            return Counter(
                _line(message)
                for queue in archive.queues(topic)
                for message in archive.queue(topic, queue.queue_id).messages()
            )


def _line(message: rocketmq_tiered.Message) -> tuple[str, ...]:
    pairs = sorted(f"{name}={value}".encode() for name, value in message.properties.items())
    numbers = (
        message.queue_id,
        message.queue_offset,
        zlib.crc32(message.body),
        len(message.body),
        message.record.store_timestamp,
        message.record.reconsume_times,
    )
    return (*map(str, numbers), b"\0".join(pairs).hex())


@pytest.fixture(scope="module")
def served(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        program = go_consumer()
    except NotInstallableError as error:
        pytest.skip(f"Go client: {error}")
    directory = tmp_path_factory.mktemp("serving-go")
    backfill(real_store("A") / "store", FileStore(directory / "archive"))
    url = f"file://{directory}/archive"
    server, address = tiered_serve(url, directory)
    server.start()
    try:
        yield Served(program, directory, url, address)
    finally:
        server.stop()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("topic", ["t_keys", "t_order"])
def test_a_go_consumer_gets_every_message_as_it_was_stored(served: Served, mode: str, topic: str) -> None:
    expected = served.expected(topic)
    found = served.consume(mode, topic, expected.total(), f"G_{mode}_{topic}")
    assert Counter(found) == expected
