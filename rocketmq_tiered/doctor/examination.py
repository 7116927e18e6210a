"""Puts the checks of `tiered doctor` together from settings, and closes what they open.

Owns the names and paths that are derived: the archive's prefix, the state directory, the pins.

Checks this program: versions, the settings' origin, its directories.

Checks the broker and its name servers over the remoting protocol: reached, the right one, version, clock.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from rocketmq_tiered.doctor.broker_store import StoreSubject, archive_checks, store_checks
from rocketmq_tiered.doctor.bucket_rules import rule_checks
from rocketmq_tiered.doctor.check import (
    Check,
    CheckFinding,
    PolicyLines,
    failed,
    failed_by,
    not_checked,
    ok,
    run_checks,
)
from rocketmq_tiered.doctor.store_trial import PART_BYTES, StoreTrial
from rocketmq_tiered.process.broker_side import (
    Connect,
    address_of,
    credentials_of,
    missing_rules,
    name_servers_of,
    names_of,
    open_store_of,
    pin_directories,
    read_conf,
    store_path,
    tls_of,
)
from rocketmq_tiered.process.instance import default_state_dir, running_instance
from rocketmq_tiered.server.security.rules import read_rules
from tiered.archive.found_objects import objects_at_end
from tiered.archive.verify_listing import newest_missing
from tiered.broker_store.conf import BrokerConf, BrokerNames
from tiered.broker_store.liveness import Liveness, LivenessReport, ask_liveness
from tiered.broker_store.pins import PinLimits
from tiered.broker_store.store import BrokerStore
from tiered.catalog.archives import list_archives
from tiered.catalog.catalog_reader import load, standing
from tiered.catalog.holdings import REPAIR_HINT, Standing
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.console import counted
from tiered.errors import NoArchiveError, NotFoundError, TieredError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.bucket_probe import open_probe
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store, parse_url
from tiered.object_store.prefixed import PrefixedStore
from tiered.private_directory import check_private, exposed_parent
from tiered.remoting.client import BrokerClient, document_of
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import ClientTls
from tiered.settings.load import CONFIG_VARIABLE, LoadedSettings
from tiered.version import VERSION

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


def broker_checks(subject: BrokerSubject, clock: Clock) -> list[Check]:
    """The checks; those after the first use what it read."""
    reached = _Reached()
    return [
        Check("broker", "broker", lambda: _broker(subject, reached)),
        Check("broker-version", "version of the broker", lambda: judge_version(reached.info), ("broker",)),
        Check(
            "broker-clock",
            "clock of the broker",
            lambda: judge_clock(reached.info, clock.wall_ms()),
            ("broker",),
        ),
        Check("name-servers", "name servers", lambda: _name_servers(subject, reached)),
    ]


def _broker(subject: BrokerSubject, reached: _Reached) -> CheckFinding:
    """Whether the broker answers, and is the one whose store this is. ``reached`` gets its configuration and runtime
    information, which later checks use."""
    report = subject.liveness()
    if not subject.address:
        if report is not None and report.liveness is Liveness.ALIVE:
            return failed(f"the broker's address is unknown, but the broker runs: {report.why}", _ADDRESS_FIX)
        return not_checked("the broker's address is unknown; give --broker-address or --broker-conf")
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
    return ok(f"{name or 'the broker'} answers at {subject.address} ({subject.origin})")


def judge_version(info: dict[str, str]) -> CheckFinding:
    """Whether this program supports the broker's version, which is in its runtime information ``info``. Pure."""
    version = info.get("brokerVersionDesc", "")
    if not version:
        return not_checked("the broker does not report its version")
    if _SUPPORTED.match(version) is None:
        return failed(
            f"the broker's version {version} is not supported", "use a broker of version 4.9 or 5.x"
        )
    return ok(version)


def judge_clock(info: dict[str, str], now_ms: int) -> CheckFinding:
    """Whether the broker's clock and this host's (``now_ms``) are the same. The broker's time is its start time plus
    the time it has run, which its runtime information ``info`` has in whole seconds. Pure."""
    runtime = _RUNTIME.search(info.get("runtime", ""))
    boot_ms = info.get("bootTimestamp", "")
    if runtime is None or not boot_ms.isdecimal():
        return not_checked("the broker does not report its start and running time")
    days, hours, minutes, seconds = map(int, runtime.groups())
    running_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    skew_ms = now_ms - int(boot_ms) - running_s * 1000
    text = f"this host's clock is {abs(skew_ms) / 1000:.0f} s {'ahead' if skew_ms > 0 else 'behind'}"
    if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
        return failed(text, "synchronize the clocks of this host and of the broker's host")
    return ok(text)


def _name_servers(subject: BrokerSubject, reached: _Reached) -> CheckFinding:
    """Whether each name server answers and knows the broker: those of broker.name_servers, else those of the broker's
    configuration."""
    listed = reached.config.get("namesrvAddr", "")
    servers = list(subject.name_servers) or [part.strip() for part in listed.split(";") if part.strip()]
    if not servers:
        return not_checked("no name server is configured; set broker.name_servers")
    name = reached.config.get("brokerName", "") or subject.name
    lacking = []
    for server in servers:
        client = subject.connect(server, subject.timeout_s, subject.credentials, subject.tls)
        try:
            answer = client.call(RequestCode.GET_BROKER_CLUSTER_INFO)
        except TieredError as error:
            report = subject.liveness()
            if report is not None and report.is_dead:
                return not_checked(f"name server {server} does not answer, and the broker does not run")
            return _unanswered(error, server, "", "start this name server, or set broker.name_servers")
        finally:
            client.close()
        if (
            answer.code == ResponseCode.SUCCESS
            and reached.info
            and name
            and name not in (document_of(answer).get("brokerAddrTable") or {})
        ):
            lacking.append(server)
    if lacking:
        fix = "set namesrvAddr of the broker, and wait 30 s for its registration"
        return failed(f"broker {name} is not registered at name server {', '.join(lacking)}", fix)
    return ok(", ".join(servers))


def _unanswered(error: TieredError, address: str, origin: str, fix: str) -> CheckFinding:
    """The address that was tried, and why it does not answer."""
    why = error.message.removeprefix(f"broker {address} ")
    return replace(failed_by(error), detail=f"{address}{origin} {why}", fix=error.hint or fix)


def host_checks(
    loaded: LoadedSettings, config_path: str | None, environment: Mapping[str, str], state_dir: Path | None
) -> list[Check]:
    """The checks of this host: program, settings, directories. ``config_path``: the settings file of the command line,
    None without one; ``state_dir``: the directory of `tiered run` for this broker, None if the broker is unknown."""
    checks = [
        Check("program", "program", program),
        Check("configuration", "configuration", lambda: configuration(loaded, config_path, environment)),
    ]
    if state_dir is not None:
        checks.append(Check("state-directory", "state directory", lambda: state_directory(state_dir)))
    cache = loaded.settings.fetch.disk_cache_path
    if cache:
        checks.append(
            Check("cache-directory", "cache directory", lambda: usable(Path(cache), "fetch.disk_cache_path"))
        )
    return checks


def program() -> CheckFinding:
    """Versions."""
    return ok(f"tiered {VERSION}, Python {platform.python_version()}, {platform.platform(terse=True)}")


def configuration(
    loaded: LoadedSettings, config_path: str | None, environment: Mapping[str, str]
) -> CheckFinding:
    """Show where the settings come from, and how many are not at their defaults. The loader has refused wrong ones."""
    if config_path:
        source = f"{Path(config_path).absolute()} (--config)"
    elif environment.get(CONFIG_VARIABLE):
        source = f"{Path(environment[CONFIG_VARIABLE]).absolute()} (${CONFIG_VARIABLE})"
    else:
        source = "no file"
    return ok(
        f"settings from {source}; {counted(len(loaded.origins), 'setting')} not at the default: tiered config check "
        "lists all"
    )


def state_directory(path: Path) -> CheckFinding:
    """Whether `tiered run` can use the state directory ``path``, and whether a running one uses it now."""
    finding = usable(path, "process.state_dir")
    try:
        instance = running_instance(path)
    except (NotFoundError, TieredError):
        return finding
    return ok(f"{path}, used by the running process {instance.pid}")


def usable(path: Path, setting: str) -> CheckFinding:
    """Whether this user can write in the directory ``path``, or create it, and other users cannot write there.
    ``setting`` chooses the directory."""
    try:
        if path.exists():
            check_private(path, setting)
    except TieredError as error:
        return failed_by(error)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return failed(
            f"{path} cannot be used: user {os.geteuid()} cannot write in {existing}",
            f"run chown {os.geteuid()} {existing}, or set {setting}",
        )
    exposed = exposed_parent(existing / "below" if existing != path else path)
    if exposed is not None:
        return failed(
            f"{path} is not safe: other users can write in {exposed}",
            f"run chmod o-w {exposed}, or set {setting}",
        )
    return ok(f"{path}" if existing == path else f"{path}, which does not exist yet")


class Examination:
    """The checks for one set of settings, as a context manager. Raises UsageError for settings that are wrong."""

    def __init__(
        self, loaded: LoadedSettings, config_path: str | None, environment: Mapping[str, str]
    ) -> None:
        """``loaded``: the settings that `tiered run` would have; ``config_path``: the settings file of the command
        line, None without one; ``environment``: variables of the process."""
        self._loaded, self._settings = loaded, loaded.settings
        self._config_path, self._environment = config_path, environment
        self._opened = ExitStack()
        self._conf = read_conf(self._settings)
        self._policy: PolicyLines | None = None
        """What the account's policy has to allow; None without a bucket."""
        self._root: ObjectStore | None = None
        """The object store at archive.url; None if that is not set."""
        self._broker_store = cache(self._open_broker_store)
        """Opens the broker's store once."""

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *_failure: object) -> None:
        self._opened.close()

    def results(self) -> Iterator[tuple[Check, CheckFinding]]:
        """Run all checks, of this host, the broker's store, the broker, the object store and the archive, in this
        order, and yield each with its finding when that is known."""
        if self._settings.archive.url:
            self._open_archive()
        names, origin = self._names()
        state_dir = self._state_dir(names)
        checks = host_checks(self._loaded, self._config_path, self._environment, state_dir)
        checks.append(Check("names", "names", lambda: self._named(names, origin)))
        checks.append(Check("access-rules", "access rules", self._access_rules))
        subject = self._store_subject(names, state_dir)
        checks += self._store_checks(subject)
        checks += broker_checks(self._broker_subject(names), MACHINE_CLOCK)
        checks += self._bucket_checks(names)
        checks.append(
            Check("archive", "archive", lambda: self._archive(names), ("bucket-list", "bucket-read"))
        )
        if subject is not None:
            checks += archive_checks(subject)
        return run_checks(checks, self._policy)

    # -- names and paths --------------------------------------------------------------------------------------

    def _names(self) -> tuple[BrokerNames, str]:
        """The names of cluster and broker, and where they are from: the settings, the broker's store, or the only
        archive at the URL. Empty if none of these says them."""
        chosen = BrokerNames(self._settings.archive.cluster, self._settings.archive.broker)
        if chosen.cluster and chosen.broker:
            return chosen, "settings"
        with suppress(TieredError, OSError):
            return names_of(self._settings, self._broker_store()), "the broker's store"
        with suppress(TieredError):
            archives = list_archives(self._root) if self._root is not None else []
            if len(archives) == 1:
                return BrokerNames(*archives[0]), "the only archive"
        return BrokerNames("", ""), ""

    def _named(self, names: BrokerNames, origin: str) -> CheckFinding:
        """Show the names of cluster and broker, and the URL of the archive that they give. Without names the archive is
        not checked."""
        if not (names.cluster and names.broker):
            return not_checked("cluster and broker are unknown; give --cluster and --broker, or --store")
        where = (
            f"{self._root.url.rstrip('/')}/{archive_prefix(*_pair(names))}"
            if self._root is not None
            else "no URL"
        )
        return ok(f"cluster {names.cluster}, broker {names.broker} (from {origin}); archive: {where}")

    def _access_rules(self) -> CheckFinding:
        """Whether there are access rules for the clients that this sidecar serves, if the broker has access control,
        and whether they can be read."""
        settings = self._settings
        if (problem := missing_rules(settings, self._conf)) is not None:
            return failed(problem.message, problem.hint)
        if not settings.serve.acl_file:
            return ok("clients need no access rules" if settings.serve.advertise else "no clients are served")
        try:
            count = len(read_rules(Path(settings.serve.acl_file)).accounts)
        except UsageError as error:
            return failed_by(error)
        return ok(f"{counted(count, 'account')} in {settings.serve.acl_file}")

    def _state_dir(self, names: BrokerNames) -> Path | None:
        if self._settings.process.state_dir:
            return Path(self._settings.process.state_dir)
        if names.cluster and names.broker:
            return default_state_dir(self._environment, names.cluster, names.broker)
        return None

    # -- the broker's side ------------------------------------------------------------------------------------

    def _has_store(self) -> bool:
        return bool(self._settings.broker.store_path or (self._conf is not None and self._conf.store_path))

    def _open_broker_store(self) -> BrokerStore:
        return self._opened.enter_context(open_store_of(self._settings, self._conf))

    def _store_checks(self, subject: StoreSubject | None) -> list[Check]:
        if subject is None:
            why = "give --store DIRECTORY or --broker-conf FILE"
            return [Check("broker-store", "store directory", lambda: not_checked(why))]
        return store_checks(subject)

    def _store_subject(self, names: BrokerNames, state_dir: Path | None) -> StoreSubject | None:
        """What the checks of the broker's store examine; None if no store was given."""
        if not self._has_store():
            return None
        places, _ = pin_directories(self._settings, self._conf, state_dir)
        return StoreSubject(
            self._broker_store,
            tuple(places),
            PinLimits().below_broker(self._conf or BrokerConf()),
            lambda: self._archived(names),
            self._settings.pins.enabled,
        )

    def _archived(self, names: BrokerNames) -> tuple[ObjectStore, CatalogState] | None:
        """The archive of the broker ``names``, and its newest state; None if there is none yet, or no URL or names are
        given."""
        if self._root is None or not (names.cluster and names.broker):
            return None
        archive = PrefixedStore(self._root, archive_prefix(*_pair(names)))
        try:
            return archive, load(archive)
        except NoArchiveError:
            return None

    def _archive(self, names: BrokerNames) -> CheckFinding:
        """Whether the archive is empty, whole or damaged, by what is below its prefix."""
        if self._root is None or not (names.cluster and names.broker):
            return not_checked("give ARCHIVE_URL, --cluster and --broker")
        store = PrefixedStore(self._root, archive_prefix(*_pair(names)))
        holding, error = standing(store)
        if error is None:
            state = load(store)
            beyond = (one.key for one in objects_at_end(store, state, all_queues=True))
            for anomaly in newest_missing(store, state, beyond):
                return failed(f"{anomaly.key} {anomaly.detail}", REPAIR_HINT)
            return ok("the archive is whole: its newest state can be loaded")
        if holding is Standing.EMPTY:
            return ok(f"empty: {error.message}; tiered run begins an archive")
        return failed(f"{holding}: {error.message}", error.hint)

    def _liveness(self) -> LivenessReport | None:
        return ask_liveness(store_path(self._settings, self._conf)) if self._has_store() else None

    def _broker_subject(self, names: BrokerNames) -> BrokerSubject:
        """What the checks of the broker need: its address, its expected name, and how to connect to it."""
        broker, conf = self._settings.broker, self._conf
        return BrokerSubject(
            address_of(self._settings, conf),
            self._loaded.origins.get("broker.address", "broker.conf"),
            names.broker,
            broker.request_timeout_ms / 1000,
            BrokerClient,
            self._liveness,
            name_servers_of(self._settings, conf),
            credentials_of(self._settings),
            tls_of(self._settings),
        )

    # -- the archive's side -----------------------------------------------------------------------------------

    def _options(self) -> StoreOptions:
        """Small parts, so that an upload in parts costs little, and no retries: a problem is shown at once."""
        settings = replace(
            self._settings.object_store, multipart_threshold_bytes=PART_BYTES, multipart_part_bytes=PART_BYTES
        )
        return StoreOptions(settings, retry_seconds=0)

    def _open_archive(self) -> None:
        url = self._settings.archive.url
        self._root = open_store(url, self._options())
        self._opened.callback(self._root.close)
        address = parse_url(url)
        if address.scheme == "s3":
            self._policy = PolicyLines(address.place, f"{address.prefix}/" if address.prefix else "")

    def _bucket_checks(self, names: BrokerNames) -> list[Check]:
        """Checks of the object store: what the account may do below the archive's prefix, and the bucket's rules."""
        if self._root is None:
            return [Check("bucket", "object store answers", lambda: not_checked("give ARCHIVE_URL"))]
        below = archive_prefix(*_pair(names)) if names.cluster and names.broker else ""
        url = self._settings.archive.url
        store = PrefixedStore(self._root, below) if below else self._root
        probe = open_probe(f"{url.rstrip('/')}/{below}".rstrip("/"), self._options())
        if probe is not None:
            self._opened.callback(probe.close)
        trial = StoreTrial(
            store,
            probe,
            self._policy,
            clock=MACHINE_CLOCK,
            largest_put_bytes=self._settings.object_store.multipart_threshold_bytes,
        )
        self._opened.callback(trial.remove)
        rules = (
            rule_checks(probe, self._policy.prefix) if probe is not None and self._policy is not None else []
        )
        return [*trial.checks(), *rules]


def _pair(names: BrokerNames) -> tuple[str, str]:
    return names.cluster, names.broker
