"""A broker, `tiered run` in proxy mode beside it, and Java clients of the proxy.

Owns the place and the requests made in it. Does not own clients' lives (client_scene.py) nor what must come of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.client_scene import (
    QUEUES,
    ClientScene,
    Consumer,
    Job,
    beside_clients,
    broker_config,
    wait_for,
)
from tests.integration.live import Sidecar
from tests.integration.live_scene import Scene
from tests.servers.child import free_port
from tests.servers.go_client import go_consumer
from tests.servers.rocketmq import run_java
from tests.servers.running_store import RunningStore
from tests.servers.store_directory import StoreDirectory


@dataclass
class ProxyScene(ClientScene):
    """A broker, `tiered run` with a tiered proxy beside it, and the clients that dial it."""

    @property
    def settings_file(self) -> Path:
        """The sidecar's, empty at first."""
        return self.directory / "tiered.toml"

    def consume(
        self,
        mode: str,
        group: str,
        wanted: int,
        *,
        topic: str = "live0",
        idle_s: int = 30,
        failures: int = 0,
        times_max: int = 16,
        version: str = "5.3.3",
        expression: str = "*",
        real: bool = False,
        flags: Sequence[str] = (),
    ) -> Consumer:
        """Start a Java consumer behind the tiered proxy, or by the ``real`` name server."""
        output = self.output(group)
        job = Job(mode, group, wanted, topic, expression, idle_s, failures, times_max)
        arguments = self._dialled(real), *job.arguments(output)
        return self.start(output, version, "Consume", *arguments, flags=flags)

    def consume_by_go(self, group: str) -> Consumer:
        """Start the Go client's push consumer, which ends when it is killed."""
        output = self.output(group)
        arguments = "push", self.address, group, "live0", str(10**6), "600", str(output)
        return self.launch(output, [str(go_consumer()), *arguments])

    def consume_all(
        self, version: str, jobs: Sequence[Job], *, flags: Sequence[str] = (), real: bool = False
    ) -> list[list[list[str]]]:
        """Run consumers at once in one process until each has what it wants: the fields of what each got."""
        outputs = [self.directory / f"{job.group}.txt" for job in jobs]
        path = self.directory / "jobs.txt"
        rows = ["\t".join(job.arguments(output)) for job, output in zip(jobs, outputs, strict=True)]
        path.write_text("\n".join(rows) + "\n", "utf-8")
        run_java(
            version,
            self.directory,
            "Consume",
            self._dialled(real),
            f"@{path}",
            flags=("-Xmx1g", *flags),
            timeout_s=200,
        )
        return [[line.split() for line in output.read_text("utf-8").splitlines()] for output in outputs]

    def mqadmin(self, *arguments: str, real: bool = False) -> str:
        """One command of mqadmin, through the tiered proxy or the real name server."""
        return self.tool(self._dialled(real), *arguments)

    def tools(self, commands: Sequence[str], *, real: bool = False, version: str = "5.3.3") -> list[str]:
        """What mqadmin prints of each command, all in one process."""
        path = self.directory / "commands.txt"
        rows = [[*command.split(" "), "-n", self._dialled(real)] for command in commands]
        path.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")
        printed = run_java(version, self.directory, "Tools", str(path))
        return [part.partition("\n")[2] for part in printed.split("=== ")[1:]]

    def wait_until_serving(self, times: int = 1) -> None:
        """The archive is open for clients, for the ``times``-th time."""
        self.sidecar.wait_until_following(60)
        wait_for(self.sidecar.log, '"the archive is open for clients"', times)

    def _dialled(self, real: bool) -> str:
        return self.broker.name_server_address if real else self.address


@contextmanager
def proxy_beside_broker(
    directory: Path,
    objects: RunningStore | StoreDirectory,
    config: Mapping[str, object],
    settings: Mapping[str, object],
    *,
    topics: int = 2,
    host: str = "127.0.0.1",
    version: str = "5.3.3",
) -> Iterator[ProxyScene]:
    """A broker that deletes on command, and a tiered proxy at ``host`` beside it, being started."""
    address = f"{host}:{free_port()}"
    environment = {
        "TIERED_SERVE__BIND": address,
        "TIERED_SERVE__ADVERTISE": address,
        "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }
    scene = Scene(
        version=version,
        topics=topics,
        queues=QUEUES,
        config={**broker_config(), **config},
        settings={**environment, **settings},
    )

    def made(sidecar: Sidecar) -> ProxyScene:
        return ProxyScene(sidecar, address, scene, directory)

    with beside_clients(scene, directory, objects, made) as found:
        found.settings_file.write_text("")
        found.sidecar.arguments = ("--config", str(found.settings_file))
        found.sidecar.start()
        yield found
