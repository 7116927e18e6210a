"""Timers beyond the broker's limit, sent by Java and gRPC clients through proxy mode, and the producers of the page:
each comes once, at its time, as the broker's own do; a recalled one does not come."""

import json
import re
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.client_scene import Job, need_clients, until
from tests.integration.proxy_scene import ProxyScene, proxy_beside_broker
from tests.servers.install import NotInstallableError, cache_directory
from tests.servers.rocketmq import CLUSTER, MQADMIN, RocketMq, compiled, rocketmq_jars, run_java
from tests.servers.rocketmq_proxy import RocketMqProxy
from tests.servers.store_directory import StoreDirectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

LIMIT_S, AHEAD_MS = 6, 4_000
TARGET = "live0"
GRPC_TOPIC = "delayed"
LATE_S = 3.0
"""Beside the broker's own lateness: commits, the hand-over and two busy cores."""
PAGE = Path(__file__).parents[2] / "docs" / "TIMERS.md"


@dataclass
class Sent:
    """What a Java producer said of each timer, by its id."""

    unique_key: str
    outcome: str


@dataclass
class Timers:
    """A broker that takes timers of LIMIT_S, and proxy mode beside it."""

    proxy: ProxyScene
    pulls: int = field(default=0)

    @property
    def broker(self) -> RocketMq:
        return self.proxy.broker

    def send(self, version: str, lines: Sequence[str]) -> dict[str, Sent]:
        """Through the tiered proxy: see ProxyTimers.java."""
        output = self.proxy.directory / f"sent-{time.monotonic_ns()}.txt"
        run_java(
            version, self.proxy.directory, "ProxyTimers", self.proxy.address, TARGET, str(output), *lines
        )
        found = {}
        for line in output.read_text("utf-8").splitlines():
            name, unique_key, outcome = line.split(" ", 2)
            found[name] = Sent(unique_key, urllib.parse.unquote_plus(outcome))
        return found

    def arrived(self, topic: str = TARGET) -> dict[str, list[int]]:
        """Unique key -> when the broker stored it in the topic, ms."""
        self.pulls += 1
        job = Job("pull", f"G-{self.pulls}", 10**6, topic=topic, idle_s=2)
        found: dict[str, list[int]] = {}
        for fields in self.proxy.consume_all("5.3.3", [job], real=True)[0]:
            found.setdefault(fields[4], []).append(int(fields[6]))
        return found


@pytest.fixture(scope="module", params=["5.3.3", "4.9.7", "5.5.0"])
def timers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Timers]:
    version = str(request.param)
    need_clients(version, "5.5.0", "4.9.7")
    directory = tmp_path_factory.mktemp("timers")
    config = {"timerMaxDelaySec": LIMIT_S, "recallMessageEnable": "true"}
    settings = {"TIERED_TIMERS__AHEAD_MS": AHEAD_MS}
    objects = StoreDirectory(directory / "objects")
    with proxy_beside_broker(directory, objects, config, settings, topics=1, version=version) as proxy:
        proxy.wait_until_serving()
        yield Timers(proxy)
        proxy.sidecar.wait_until_archived(60)
        assert proxy.sidecar.stop() == 0, proxy.sidecar.log.read_text()[-2000:]
        for command in (
            ("verify", proxy.sidecar.url, "--full", "--strict"),
            ("gc", proxy.sidecar.url, "--apply", "--grace", "0s"),
            ("verify", proxy.sidecar.url, "--full", "--strict"),
        ):
            done = proxy.sidecar.tiered(*command)
            assert done.returncode == 0, done.stdout + done.stderr


def test_java_producers_send_timers_that_come_once_at_their_time(timers: Timers) -> None:
    now_ms = int(time.time() * 1000)
    sent, due_ms = {}, {}
    for client in ("5.5.0", "4.9.7"):
        due = {f"{client}-{n}": now_ms + 12_000 + 700 * n for n in range(6)}
        lines = [f"{name},TIMER_DELIVER_MS,{at}" for name, at in due.items()]
        lines += [
            f"{client}-now,NONE,0",
            f"{client}-near,TIMER_DELAY_SEC,3",
            f"{client}-illegal,TIMER_DELIVER_MS,soon",
        ]
        lines += [f"{client}-far,TIMER_DELAY_SEC,{800 * 86_400}"]
        if client == "5.5.0":
            lines.append(f"recalled,TIMER_DELIVER_MS,{now_ms + 14_000},recall")
        sent |= timers.send(client, lines)
        due_ms |= due
    assert {one.outcome for name, one in sent.items() if name in due_ms} == {"SEND_OK"}
    assert sent["recalled"].outcome == f"recalled:{sent['recalled'].unique_key}"
    for client in ("5.5.0", "4.9.7"):
        assert "CODE: 13" in sent[f"{client}-illegal"].outcome
        assert (
            "the timer's time lies too far ahead: 730 days are allowed (timers.max_delay_ms)"
            in sent[f"{client}-far"].outcome
        )
    wanted = {one.unique_key for one in sent.values() if one.outcome == "SEND_OK"}
    time.sleep(max(0.0, max(due_ms.values()) / 1000 + 0.5 - time.time()))
    arrived: dict[str, list[int]] = {}

    def is_complete() -> bool:
        nonlocal arrived
        arrived = timers.arrived()
        return wanted <= set(arrived)

    until(is_complete, "every timer", 60)
    assert set(arrived) == wanted, "and the recalled one did not come"
    assert {len(times) for times in arrived.values()} == {1}
    late_s = [(arrived[sent[name].unique_key][0] - at) / 1000 for name, at in due_ms.items()]
    assert min(late_s) >= 0 and max(late_s) < LATE_S, late_s


def test_a_grpc_client_sends_timers_through_the_proxy_of_rocketmq(timers: Timers) -> None:
    broker = timers.broker
    if not broker.version.startswith("5"):
        pytest.skip("the proxy of RocketMQ needs a 5.x broker")
    broker.run_java(
        MQADMIN,
        "updateTopic",
        "-b",
        broker.broker_address,
        "-t",
        GRPC_TOPIC,
        "-r",
        "4",
        "-w",
        "4",
        "-a",
        "+message.type=DELAY",
        "-n",
        broker.name_server_address,
    )
    try:
        proxy = RocketMqProxy(timers.proxy.directory / "proxy", timers.proxy.address, CLUSTER)
    except NotInstallableError as error:
        pytest.skip(f"proxy: {error}")
    proxy.configure(json.loads(block("json")))
    with proxy:
        first_ms = int(time.time() * 1000) + 15_000
        due = [first_ms + 500 * n for n in range(4)]
        answers = proxy.run("GrpcTimers", GRPC_TOPIC, *map(str, due), str(first_ms + 800 * 86_400_000))
        lines = [line.split(" ", 1) for line in answers.splitlines()]
        assert "lies too far ahead" in lines[-1][1]
        wanted = {key: int(at) for at, key in lines[:-1]}
        assert len(wanted) == len(due)
        wanted |= python_producer(timers, proxy)
        time.sleep(max(0.0, max(wanted.values()) / 1000 + 0.5 - time.time()))
        until(lambda: set(wanted) <= set(timers.arrived(GRPC_TOPIC)), "every timer", 60)
    arrived = timers.arrived(GRPC_TOPIC)
    assert {key: len(times) for key, times in arrived.items()} == dict.fromkeys(wanted, 1)
    late_s = [(arrived[key][0] - at) / 1000 for key, at in wanted.items()]
    # Clients of Python give whole seconds.
    assert min(late_s) >= 0 and max(late_s) < LATE_S, late_s


# -- docs/TIMERS.md -------------------------------------------------------------------------------------------------


def block(language: str, number: int = 0) -> str:
    """A block of code of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)[
        number
    ]


def python_producer(timers: Timers, proxy: RocketMqProxy) -> dict[str, int]:
    """Run the page's producer in Python: unique key and time of its timer."""
    place = cache_directory() / "python-grpc"
    if not (place / "bin" / "python").exists():
        subprocess.run(["python3", "-m", "venv", str(place)], check=True)
    done = subprocess.run(
        [place / "bin" / "pip", "install", "-q", "rocketmq-python-client==5.1.2"], check=False
    )
    if done.returncode != 0:
        pytest.skip("the Python client cannot be installed")
    due_s = int(time.time()) + 14
    code = block("python").replace("proxy-host.example:8081", proxy.address).replace("reminders", GRPC_TOPIC)
    code = code.replace("Credentials())", "Credentials(), request_timeout=20)")
    code = re.sub(r"int\(time\.time\(\)\) \+ [0-9* _]+", str(due_s), code)
    ran = subprocess.run(
        [place / "bin" / "python", "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {ran.stdout.strip().splitlines()[-1]: due_s * 1000}


@pytest.mark.parametrize("number", [0, 1])
def test_the_producers_in_java_of_the_page_run(timers: Timers, tmp_path: Path, number: int) -> None:
    """0: through proxy mode, recalled at once; 1: to the gateway topic."""
    timers.broker.create_topic("reminders", 4)
    timers.broker.create_topic("TIERED_TIMERS", 8)
    name = f"Page{number}"
    code = block("java", number)
    for host in ("broker-host.example:9876", "nameserver:9876"):
        dialled = timers.proxy.address if host.startswith("broker") else timers.broker.name_server_address
        code = code.replace(host, dialled)
    source = tmp_path / f"{name}.java"
    source.write_text(
        "import java.nio.charset.StandardCharsets; import java.util.concurrent.TimeUnit;\n"
        "import org.apache.rocketmq.client.producer.*; import org.apache.rocketmq.common.message.Message;\n"
        f"public class {name} {{ public static void main(String[] a) throws Exception {{\n{code}\n"
        "System.out.println(sent.getSendStatus()); producer.shutdown(); System.exit(0); } }"
    )
    jars = rocketmq_jars("5.5.0")
    classes = compiled(f"page-{number}", jars, [source])
    command = ["java", f"-Duser.home={tmp_path}", "-cp", f"{classes}:{jars}/*", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0 and "SEND_OK" in done.stdout, done.stdout + done.stderr
    if number:
        timers.proxy.sidecar.wait_until_archived(60)
        commands_of_the_page(timers)


def commands_of_the_page(timers: Timers) -> None:
    """With one timer pending."""
    url = timers.proxy.sidecar.url
    listed = json.loads(timers.proxy.sidecar.tiered("timers", "ls", url, "--json").stdout)
    (timer,) = [one for one in listed if one["topic"] == "reminders"]
    commands = re.findall(r"^    tiered (timers .*?)(?: +#.*)?$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(commands) == 6
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 90 * 86_400))
    own = {"s3://bucket/rocketmq": url, "UNIQ_KEY": timer["uniqKey"], "3:1042": timer["place"]}
    for command in commands:
        words = [{**own, "2027-03-01T08:00:00Z": later}.get(word, word) for word in command.split()]
        done = timers.proxy.sidecar.tiered(*words)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    shown = timers.proxy.sidecar.tiered("timers", "show", url, "reminders", timer["uniqKey"])
    assert shown.returncode == 3, "cancelled"
