"""A RocketMQ 5 proxy in cluster mode before any name server, and the gRPC client for Java."""

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.servers.child import ChildServer, Startable, free_port
from tests.servers.install import TIMEOUT_S
from tests.servers.rocketmq import JAVA_OPENS, JAVA_SOURCES, compiled, maven_jars

PROXY_VERSION, GRPC_CLIENT_VERSION = "5.3.3", "5.0.8"


def proxy_jars(timeout_s: float = TIMEOUT_S) -> Path:
    """The proxy's jars, fetched now when missing."""
    return maven_jars(f"proxy-{PROXY_VERSION}", {"rocketmq-proxy": PROXY_VERSION}, timeout_s)


def grpc_programs(timeout_s: float = TIMEOUT_S) -> tuple[Path, Path]:
    """The gRPC client's jars and the programs of ``java/grpc`` compiled against them."""
    jars = maven_jars(f"grpc-{GRPC_CLIENT_VERSION}", {"rocketmq-client-java": GRPC_CLIENT_VERSION}, timeout_s)
    return jars, compiled("grpc", jars, sorted((JAVA_SOURCES / "grpc").glob("*.java")))


class RocketMqProxy(Startable):
    """Call ``start`` first and ``stop`` last."""

    def __init__(self, directory: Path, name_server: str, cluster: str) -> None:
        self._jars = proxy_jars()
        self._client, self._programs = grpc_programs()
        self._directory = directory
        grpc, remoting = free_port(), free_port()
        self.address, self.remoting_address = f"127.0.0.1:{grpc}", f"127.0.0.1:{remoting}"
        configuration = self._configuration = directory / "conf" / "rmq-proxy.json"
        configuration.parent.mkdir(parents=True)
        configuration.write_text(
            json.dumps(
                {
                    "rocketMQClusterName": cluster,
                    "namesrvAddr": name_server,
                    "grpcServerPort": grpc,
                    "remotingListenPort": remoting,
                    "localServeAddr": "127.0.0.1",
                    "proxyMode": "CLUSTER",
                }
            )
        )
        command = [
            "java",
            "-Xmx512m",
            *JAVA_OPENS,
            f"-Duser.home={directory}",
            "-cp",
            f"{self._jars}/*",
            "org.apache.rocketmq.proxy.ProxyStartup",
            "-pc",
            str(configuration),
        ]
        environment = {"RMQ_PROXY_HOME": str(directory), "ROCKETMQ_HOME": str(directory)}
        self.server = ChildServer("proxy", command, environment, directory / "proxy.out", self._listens)

    def _listens(self) -> bool:
        """gRPC is its last port but one; it answers when both are open."""
        for address in (self.address, self.remoting_address):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0:
                    return False
        return True

    def start(self) -> None:
        """Start and wait until it serves."""
        self.server.start()

    def stop(self) -> None:
        """Stop it."""
        self.server.stop()

    def configure(self, settings: Mapping[str, object]) -> None:
        """More settings, before it is started."""
        found = json.loads(self._configuration.read_text())
        self._configuration.write_text(json.dumps(found | dict(settings)))

    def consume(self, *arguments: str, timeout_s: float = 90) -> str:
        """Run GrpcConsume.java to its end; what it printed."""
        return self.run("GrpcConsume", *arguments, timeout_s=timeout_s)

    def command(self, program: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
        """The command line of a program of ``java/grpc``."""
        return [
            "java",
            "-Xmx256m",
            f"-Duser.home={self._directory}",
            *flags,
            "-cp",
            f"{self._programs}:{self._client}/*",
            program,
            self.address,
            *arguments,
        ]

    def run(self, program: str, *arguments: str, timeout_s: float = 90) -> str:
        """Run a program of ``java/grpc`` to its end; what it printed."""
        command = self.command(program, *arguments)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        return done.stdout
