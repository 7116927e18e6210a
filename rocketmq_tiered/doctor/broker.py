"""Checks the broker and its name servers over the remoting protocol: reached, the right one, version, clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rocketmq_tiered.doctor.check import Check, CheckFinding, failed, failed_by, not_checked, ok
from rocketmq_tiered.process.broker_side import Connect
from tiered.broker_store.liveness import Liveness, LivenessReport
from tiered.errors import TieredError
from tiered.formats import fastjson
from tiered.remoting.codes import RequestCode, ResponseCode
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import ClientTls

CLOCK_SKEW_MS_MAX = 60_000
"""Above this, times of messages and of this program differ visibly."""
_RUNTIME = re.compile(r"(\d+) days, (\d+) hours, (\d+) minutes, (\d+) seconds")
_SUPPORTED = re.compile(r"V(4_9|5_)")
_ADDRESS_FIX = "give --broker-address HOST:PORT, or --broker-conf with brokerIP1 and listenPort"


@dataclass(frozen=True)
class BrokerSubject:
    """The broker: ``address`` and where it is from, its expected name, and how to connect."""

    address: str
    origin: str
    name: str
    timeout_s: float
    connect: Connect
    liveness: Callable[[], LivenessReport | None]
    name_servers: Sequence[str] = ()
    credentials: Credentials | None = None
    tls: ClientTls | None = None


@dataclass
class _Reached:
    """What the broker returned."""

    info: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)


def broker_checks(subject: BrokerSubject, clock_ms: Callable[[], int]) -> list[Check]:
    """The checks; those after the first use what it read."""
    reached = _Reached()
    return [
        Check("broker", "broker", lambda: _broker(subject, reached)),
        Check("broker-version", "version of the broker", lambda: judge_version(reached.info), ("broker",)),
        Check(
            "broker-clock", "clock of the broker", lambda: judge_clock(reached.info, clock_ms()), ("broker",)
        ),
        Check("name-servers", "name servers", lambda: _name_servers(subject, reached)),
    ]


def _broker(subject: BrokerSubject, reached: _Reached) -> CheckFinding:
    report = subject.liveness()
    if not subject.address:
        if report is not None and report.liveness is Liveness.ALIVE:
            return failed(f"its address is unknown, and it runs: {report.why}", _ADDRESS_FIX)
        return not_checked("its address is unknown; give --broker-address or --broker-conf")
    try:
        client = subject.connect(subject.address, subject.timeout_s, subject.credentials, subject.tls)
        try:
            reached.config = client.broker_config() or {}
            reached.info = client.runtime_info()
        finally:
            client.close()
    except TieredError as error:
        if report is not None and report.is_dead:
            return not_checked(f"the broker does not run: {report.why}")
        return _unanswered(error, subject.address, f" ({subject.origin})", _ADDRESS_FIX)
    name = reached.config.get("brokerName", "")
    if name and subject.name and name != subject.name:
        return failed(
            f"the broker at {subject.address} ({subject.origin}) is {name}, but the store is that of {subject.name}",
            "set broker.address, or brokerIP1 and listenPort of broker.conf",
        )
    return ok(f"{name or 'answers'} at {subject.address} ({subject.origin})")


def judge_version(info: dict[str, str]) -> CheckFinding:
    """Whether this broker's formats are known. Pure."""
    version = info.get("brokerVersionDesc", "")
    if not version:
        return not_checked("the broker does not report it")
    if _SUPPORTED.match(version) is None:
        return failed(f"{version} is not supported", "use a broker of 4.9 or 5.x")
    return ok(version)


def judge_clock(info: dict[str, str], now_ms: int) -> CheckFinding:
    """The broker's clock from its start time and its running time, which it reports in whole seconds. Pure."""
    runtime = _RUNTIME.search(info.get("runtime", ""))
    boot_ms = info.get("bootTimestamp", "")
    if runtime is None or not boot_ms.isdecimal():
        return not_checked("the broker does not report it")
    days, hours, minutes, seconds = map(int, runtime.groups())
    running_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    skew_ms = now_ms - int(boot_ms) - running_s * 1000
    text = f"this host is {abs(skew_ms) / 1000:.0f} s {'ahead' if skew_ms > 0 else 'behind'}"
    if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        return failed(text, "synchronize the clocks of this host and of the broker's")
    return ok(text)


def _name_servers(subject: BrokerSubject, reached: _Reached) -> CheckFinding:
    listed = reached.config.get("namesrvAddr", "")
    servers = list(subject.name_servers) or [part.strip() for part in listed.split(";") if part.strip()]
    if not servers:
        return not_checked("none is configured; set broker.name_servers")
    name = reached.config.get("brokerName", "") or subject.name
    lacking = []
    for server in servers:
        client = subject.connect(server, subject.timeout_s, subject.credentials, subject.tls)
        try:
            answer = client.call(RequestCode.GET_BROKER_CLUSTER_INFO)
        except TieredError as error:
            report = subject.liveness()
            if report is not None and report.is_dead:
                return not_checked(f"{server} does not answer; the broker does not run")
            return _unanswered(error, server, "", "start it, or set broker.name_servers")
        finally:
            client.close()
        if (
            answer.code == ResponseCode.SUCCESS
            and reached.info
            and name
            and name not in _brokers(answer.body)
        ):
            lacking.append(server)
    if lacking:
        fix = "set namesrvAddr of the broker, and wait 30 s for its registration"
        return failed(f"{', '.join(lacking)}: broker {name} is not registered", fix)
    return ok(", ".join(servers))


def _brokers(body: bytes) -> set[str]:
    document = fastjson.loads(body)
    table = document.get("brokerAddrTable") if isinstance(document, dict) else None
    return set(table) if isinstance(table, dict) else set()


def _unanswered(error: TieredError, address: str, origin: str, fix: str) -> CheckFinding:
    """The address that was tried, and why it does not answer."""
    why = error.message.removeprefix(f"broker {address} ")
    return replace(failed_by(error), detail=f"{address}{origin} {why}", fix=error.hint or fix)
