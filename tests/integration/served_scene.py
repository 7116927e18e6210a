"""An archive, `tiered serve` over it, and the Java clients that read it."""

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import rocketmq_tiered
from tests.servers.child import ChildServer
from tests.servers.rocketmq import run_java

Line = tuple[int, int, int, int]
"""Queue id, queue offset, CRC-32 of the body, its length."""


class Job(NamedTuple):
    """One Java consumer (Consume.java). It gives each message back ``failures`` times."""

    mode: str
    topic: str
    wanted: int
    group: str
    expression: str = "*"
    idle_s: int = 50
    failures: int = 0
    times_max: int = 16


@dataclass
class Served:
    """An archive and `tiered serve` over it."""

    directory: Path
    url: str
    address: str
    server: ChildServer

    def expected(
        self, topic: str, wanted: Callable[[rocketmq_tiered.Message], bool] = lambda _: True
    ) -> Counter[Line]:
        """What a consumer of all of ``topic`` gets."""
        with rocketmq_tiered.open(self.url) as archive:
            return Counter(
                (message.queue_id, message.queue_offset, zlib.crc32(message.body), len(message.body))
                for queue in archive.queues(topic)
                for message in archive.queue(topic, queue.queue_id).messages()
                if wanted(message)
            )

    def consume(self, version: str, *jobs: Job, flags: tuple[str, ...] = ()) -> list[list[Line]]:
        """Run consumers until each has what it wants or gets none for a while: what they got, in order of arrival."""
        command = self.job_arguments(*jobs)
        run_java(version, self.directory, "Consume", *command, flags=("-Xmx512m", *flags), timeout_s=200)
        return [
            [(int(f[0]), int(f[1]), int(f[2]), int(f[3])) for f in self.lines(number)]
            for number in range(len(jobs))
        ]

    def job_arguments(self, *jobs: Job) -> tuple[str, str]:
        """Arguments of Consume.java for these jobs."""
        rows = [
            (
                *job[:1],
                job.group,
                job.topic,
                job.expression,
                job.wanted,
                job.idle_s,
                self.directory / f"consumed-{number}.txt",
                job.failures,
                job.times_max,
            )
            for number, job in enumerate(jobs)
        ]
        # Who watches the outputs must not take an earlier test's lines for these jobs'.
        for number in range(len(jobs)):
            (self.directory / f"consumed-{number}.txt").unlink(missing_ok=True)
        path = self.directory / "jobs.txt"
        path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), "utf-8")
        return self.address, f"@{path}"

    def lines(self, number: int) -> list[list[str]]:
        """What job ``number`` wrote, field by field."""
        path = self.directory / f"consumed-{number}.txt"
        return [line.split() for line in path.read_text("utf-8").splitlines()]

    def mqadmin(self, version: str, *commands: str) -> list[str]:
        """What mqadmin prints of each command."""
        path = self.directory / "commands.txt"
        rows = [[*command.split(" "), "-n", self.address] for command in commands]
        path.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")
        printed = run_java(version, self.directory, "Tools", str(path))
        return [part.partition("\n")[2] for part in printed.split("=== ")[1:]]
