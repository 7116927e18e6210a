"""A real name server and broker of a chosen version, and Java programs that talk to them.

Jars come from Maven once, into the cache; programs in ``java/`` are compiled against them. The broker keeps its
store directory over ``restart``, ``kill`` and ``start``.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.child import ChildServer, Startable, free_port_block
from tests.servers.install import TIMEOUT_S, NotInstallableError, cache_directory, only_once, run_installer

JAVA_SOURCES = Path(__file__).parent / "java"
CLUSTER, BROKER = "LiveCluster", "live-a"
JAVA_OPENS = [
    f"--add-{kind}=java.base/{package}=ALL-UNNAMED"
    for kind, package in (
        ("opens", "java.nio"),
        ("opens", "sun.nio.ch"),
        ("opens", "java.lang"),
        ("opens", "jdk.internal.ref"),
        ("exports", "jdk.internal.ref"),
        ("exports", "sun.nio.ch"),
    )
]
_QUICK = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
"""For what ends before the second compiler pays: half a name server's CPU is its compiling, a sixth of a tool's."""
_MEASURED = ("Load", "PullMany", "PullSpeed")
"""Programs of ``java/`` whose own speed is measured."""
MQADMIN = "org.apache.rocketmq.tools.command.MQAdminStartup"
"""Main class of mqadmin; its arguments are mqadmin's."""
_PRINTED = (MQADMIN, "Tools")
"""What they print is compared. Without a configuration of its own logback takes another part's, and says so."""
_SILENT = f"-Drmq.logback.configurationFile={JAVA_SOURCES / 'silent.xml'}"
_POM = (
    '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>x</groupId>'
    "<artifactId>jars</artifactId><version>1</version><dependencies>{}</dependencies></project>"
)
COPY_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
_ARTIFACTS = ("rocketmq-namesrv", "rocketmq-broker", "rocketmq-client", "rocketmq-tools")
_LOGBACK = (
    "<configuration><appender name='F' class='ch.qos.logback.core.FileAppender'><file>{}</file><encoder>"
    "<pattern>%d %p %m%n</pattern></encoder></appender>"
    "<root level='WARN'><appender-ref ref='F'/></root></configuration>"
)


def rocketmq_jars(version: str, timeout_s: float = TIMEOUT_S) -> Path:
    """The directory of all jars of one RocketMQ version, fetched now when missing."""
    return maven_jars(version, dict.fromkeys(_ARTIFACTS, version), timeout_s)


def maven_jars(name: str, artifacts: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Path:
    """A directory ``name`` of the cache with RocketMQ's ``artifacts`` (name: version) and all they need."""
    for program in ("java", "javac"):
        if shutil.which(program) is None:
            raise NotInstallableError(f"{program} is not on PATH")
    jars = cache_directory() / "jars" / name
    complete = jars / ".complete"
    if not complete.exists():
        with only_once(f"jars-{name}"):
            if not complete.exists():
                _fetch(artifacts, jars, timeout_s)
                complete.touch()
    return jars


def _fetch(artifacts: Mapping[str, str], jars: Path, timeout_s: float) -> None:
    if shutil.which("mvn") is None:
        raise NotInstallableError("RocketMQ's jars come from Maven, which is not on PATH")
    jars.mkdir(parents=True, exist_ok=True)
    pom = jars / "pom.xml"
    dependency = (
        "<dependency><groupId>org.apache.rocketmq</groupId>"
        "<artifactId>{}</artifactId><version>{}</version></dependency>"
    )
    pom.write_text(_POM.format("".join(dependency.format(*artifact) for artifact in artifacts.items())))
    command = [
        "mvn",
        "-q",
        "-B",
        "--strict-checksums",
        "-f",
        str(pom),
        f"{COPY_PLUGIN}:copy-dependencies",
        f"-DoutputDirectory={jars}",
        "-DincludeScope=runtime",
    ]
    run_installer(command, timeout_s)


def java_classes(version: str, timeout_s: float = TIMEOUT_S) -> Path:
    """The programs of ``java/`` compiled against one version."""
    return compiled(version, rocketmq_jars(version, timeout_s), sorted(JAVA_SOURCES.glob("*.java")))


def compiled(name: str, jars: Path, sources: Sequence[Path]) -> Path:
    """The directory ``name`` of the cache with the classes of ``sources``, compiled now when older than these."""
    classes = cache_directory() / "classes" / name
    newest = max(source.stat().st_mtime for source in sources)
    complete = classes / ".complete"
    with only_once(f"classes-{name}"):
        if not complete.exists() or complete.stat().st_mtime < newest:
            classes.mkdir(parents=True, exist_ok=True)
            command = ["javac", "-nowarn", "-d", str(classes), "-cp", f"{jars}/*", *map(str, sources)]
            try:
                run_installer(command)
            except NotInstallableError as error:
                raise RuntimeError(f"our own program is wrong: {error}") from error
            complete.touch()
    return classes


def java_command(
    version: str, directory: Path, program: str, *arguments: str, flags: Sequence[str] = ()
) -> list[str]:
    """The command line of a program of ``java/``, or of a main class of the jars; it logs into ``directory``."""
    compilers = [] if program in _MEASURED else _QUICK
    return [
        "java",
        "-Xmx256m",
        *compilers,
        *JAVA_OPENS,
        f"-Drocketmq.client.logRoot={directory}/clientlogs",
        "-Drocketmq.client.logLevel=ERROR",
        f"-Duser.home={directory}",
        *([_SILENT] if program in _PRINTED else []),
        *flags,
        "-cp",
        f"{java_classes(version)}:{rocketmq_jars(version)}/*",
        program,
        *arguments,
    ]


def run_java(
    version: str,
    directory: Path,
    program: str,
    *arguments: str,
    flags: Sequence[str] = (),
    timeout_s: float = 120,
) -> str:
    """Run a Java program to its end; what it printed. Raises RuntimeError with its words when it fails."""
    command = java_command(version, directory, program, *arguments, flags=flags)
    environment = {**os.environ, "ROCKETMQ_HOME": str(directory)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def checking_signatures(version: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Configuration of a broker that requires signatures, with this account in 5.x; 4.9 reads plain_acl.yml."""
    if not version.startswith("5"):
        return {"aclEnable": "true"}
    providers = "org.apache.rocketmq.auth.authentication.provider."
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{providers}DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{providers}LocalAuthenticationMetadataProvider",
        "initAuthenticationUser": f'{{"username":"{access_key}","password":"{secret_key}"}}',
        "innerClientAuthenticationCredentials": f'{{"accessKey":"{access_key}","secretKey":"{secret_key}"}}',
    }


def judging_permissions(version: str) -> dict[str, str]:
    """Configuration of a broker with signatures that also judges what an account may do; 4.9 always does."""
    if not version.startswith("5"):
        return {}
    providers = "org.apache.rocketmq.auth.authorization.provider."
    return {
        "authorizationEnabled": "true",
        "authorizationProvider": f"{providers}DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{providers}LocalAuthorizationMetadataProvider",
    }


def recorded_settings(conf: Path) -> dict[str, str]:
    """Settings of a recorded broker for one on a copy of its store, which has addresses and directories of its own and
    deletes no file for its age."""
    found = dict(line.split("=", 1) for line in conf.read_text().splitlines() if "=" in line)
    return {
        **{name: value for name, value in found.items() if name not in _OWN},
        "fileReservedTime": "876000",
    }


_OWN = ("listenPort", "haListenPort", "namesrvAddr", "storePathRootDir", "storePathCommitLog", "bindAddress")


@dataclass
class RocketMq(Startable):
    """A broker and its name servers, one or two, under ``directory``. Call ``start`` first and ``stop`` last."""

    version: str
    directory: Path
    config: Mapping[str, object] = field(default_factory=dict)
    name_server_count: int = 1

    def __post_init__(self) -> None:
        self.jars = rocketmq_jars(self.version)
        self.store = self.directory / "store"
        self.broker_conf = self.directory / "broker.conf"
        # The broker also listens for replicas at its port + 1 and for "VIP" clients at its port - 2.
        first = free_port_block(6)
        ports = range(first, first + self.name_server_count)
        self.name_server_addresses = [f"127.0.0.1:{port}" for port in ports]
        self.name_server_address = self.name_server_addresses[0]
        self.broker_address = f"127.0.0.1:{first + 4}"
        self._write_configuration()
        self.name_servers = [
            self._server(
                f"name-server-{port}", "namesrv.NamesrvStartup", f"namesrv-{port}.conf", ["-Xmx256m", *_QUICK]
            )
            for port in ports
        ]
        self.name_server = self.name_servers[0]
        self.broker = self._server(
            "broker", "broker.BrokerStartup", "broker.conf", ["-Xmx768m", "-XX:+UseG1GC"]
        )

    def start(self) -> None:
        """Start all and wait until they serve."""
        try:
            for server in (*self.name_servers, self.broker):
                server.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all, gracefully."""
        self.broker.stop(timeout_s=40)
        for server in self.name_servers:
            server.stop()

    def restart_with(self, config: Mapping[str, object]) -> None:
        """Kill the broker, which is quicker than to end it, and start it with other settings beside those it had."""
        self.config = {**self.config, **config}
        self.broker.kill()
        self._write_configuration()
        self.broker.start()

    def create_topic(self, topic: str, queues: int) -> None:
        """Create or update a topic at the broker."""
        self.run_java(
            "Admin", self.name_server_address, self.broker_address, "create", CLUSTER, topic, str(queues)
        )

    def delete_topic(self, topic: str) -> None:
        """Delete a topic from broker and name server."""
        self.run_java("Admin", self.name_server_address, self.broker_address, "delete", CLUSTER, topic, "0")

    def run_java(self, program: str, *arguments: str, timeout_s: float = 300) -> str:
        """Run a program of ``java/`` to its end; what it printed."""
        return run_java(self.version, self.directory, program, *arguments, timeout_s=timeout_s)

    def java_command(self, program: str, *arguments: str) -> list[str]:
        """The command line of a program of ``java/``."""
        return java_command(self.version, self.directory, program, *arguments)

    def _write_configuration(self) -> None:
        (self.directory / "conf").mkdir(parents=True, exist_ok=True)
        for name in ("namesrv", "broker"):
            (self.directory / "conf" / f"logback_{name}.xml").write_text(
                _LOGBACK.format(self.directory / f"{name}.log")
            )
        is_5 = self.version.startswith("5")
        for address in self.name_server_addresses:
            host, port = address.split(":")
            bind = [f"bindAddress={host}"] if is_5 else []
            (self.directory / f"namesrv-{port}.conf").write_text("\n".join([f"listenPort={port}", *bind, ""]))
        listen = int(self.broker_address.rpartition(":")[2])
        settings: dict[str, object] = {
            "brokerClusterName": CLUSTER,
            "brokerName": BROKER,
            "brokerId": 0,
            "brokerRole": "ASYNC_MASTER",
            "flushDiskType": "ASYNC_FLUSH",
            "brokerIP1": "127.0.0.1",
            "autoCreateTopicEnable": "false",
            "mappedFileSizeCommitLog": 64 << 20,
            "mappedFileSizeConsumeQueue": 600_000,
            "maxHashSlotNum": 50_000,
            "maxIndexNum": 200_000,
            "traceTopicEnable": "false",
            # Else a broker deletes whatever it can when the disk of all tests is 85 % full, in the middle of a test.
            "diskMaxUsedSpaceRatio": 95,
            "cleanFileForciblyEnable": "false",
            "waitTimeMillsInSendQueue": 5000,
            "osPageCacheBusyTimeOutMills": 5000,
            "listenPort": listen,
            "haListenPort": listen + 1,
            "namesrvAddr": ";".join(self.name_server_addresses),
            "storePathRootDir": self.store,
            "storePathCommitLog": self.store / "commitlog",
            **({"bindAddress": "127.0.0.1"} if is_5 else {}),
            **self.config,
        }
        self.broker_conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def _server(self, name: str, main: str, conf: str, flags: Sequence[str]) -> ChildServer:
        log = self.directory / f"{name}.out"
        command = [
            "java",
            "-Xms128m",
            *flags,
            "-XX:MaxDirectMemorySize=512m",
            *JAVA_OPENS,
            f"-Duser.home={self.directory}",
            "-cp",
            f"{self.jars}/*",
            f"org.apache.rocketmq.{main}",
            "-c",
            str(self.directory / conf),
        ]
        return ChildServer(name, command, {"ROCKETMQ_HOME": str(self.directory)}, log, _SaysBootSuccess(log))


class _SaysBootSuccess:
    """Ready when the log says so once more than at the last start."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._seen = 0

    def __call__(self) -> bool:
        times = self._log.read_bytes().count(b"boot success")
        if times > self._seen:
            self._seen = times
            return True
        return False
