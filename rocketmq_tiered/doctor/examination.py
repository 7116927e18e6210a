"""Puts the checks of `tiered doctor` together from settings, and closes what they open.

Owns the names and paths that are derived: the archive's prefix, the state directory, the pins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from rocketmq_tiered.doctor.broker import BrokerSubject, broker_checks
from rocketmq_tiered.doctor.broker_store import (
    StoreAccess,
    StoreSubject,
    continuation_check,
    margin_check,
    store_checks,
)
from rocketmq_tiered.doctor.bucket_rules import rule_checks
from rocketmq_tiered.doctor.check import (
    Check,
    CheckFinding,
    PolicyLines,
    Result,
    failed,
    failed_by,
    not_checked,
    ok,
    run_checks,
)
from rocketmq_tiered.doctor.host import host_checks
from rocketmq_tiered.doctor.store_trial import PART_BYTES, StoreTrial
from rocketmq_tiered.process.broker_side import (
    address_of,
    credentials_of,
    missing_rules,
    name_servers_of,
    names_of,
    open_store_of,
    read_conf,
    store_path,
    tls_of,
)
from rocketmq_tiered.process.instance import default_state_dir
from rocketmq_tiered.server.security.rules import read_rules
from tiered.archive.found_objects import objects_at_end
from tiered.archive.verify_listing import newest_missing
from tiered.broker_store.conf import BrokerConf
from tiered.broker_store.liveness import LivenessReport, ask_liveness
from tiered.broker_store.names import BrokerNames
from tiered.broker_store.pins import PinLimits, measure_disk
from tiered.broker_store.store import BrokerStore
from tiered.catalog.archives import list_archives
from tiered.catalog.catalog_reader import load, standing
from tiered.catalog.holdings import REPAIR_HINT, Standing
from tiered.catalog.state import CatalogState
from tiered.console import counted
from tiered.errors import NoArchiveError, TieredError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.bucket_probe import open_probe
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store, parse_url
from tiered.object_store.prefixed import PrefixedStore
from tiered.object_store.store_options import StoreOptions
from tiered.remoting.client import BrokerClient
from tiered.settings.load import LoadedSettings
from tiered.timestamps import wall_ms


@dataclass(frozen=True)
class Names:
    """Names of cluster and broker, and where they are from. Empty: unknown."""

    names: BrokerNames
    origin: str


class Examination:
    """The checks for one set of settings, as a context manager. Raises UsageError for settings that are wrong."""

    def __init__(
        self, loaded: LoadedSettings, config_path: str | None, environment: Mapping[str, str]
    ) -> None:
        self._loaded, self._settings = loaded, loaded.settings
        self._config_path, self._environment = config_path, environment
        self._opened = ExitStack()
        self._conf = read_conf(self._settings)
        self._policy: PolicyLines | None = None
        self._root: ObjectStore | None = None
        self._broker_store = cache(self._open_broker_store)

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *_failure: object) -> None:
        self._opened.close()

    def results(self) -> Iterator[Result]:
        """Run all checks, in order."""
        if self._settings.archive.url:
            self._open_archive()
        found = self._names()
        names = found.names
        state_dir = self._state_dir(names)
        checks = host_checks(self._loaded, self._config_path, self._environment, state_dir)
        checks.append(Check("names", "names", lambda: self._named(found)))
        checks.append(Check("access-rules", "access rules", self._access_rules))
        subject = self._store_subject(names, state_dir)
        checks += self._store_checks(subject)
        checks += broker_checks(self._broker_subject(names), wall_ms)
        checks += self._bucket_checks(names)
        checks.append(
            Check("archive", "archive", lambda: self._archive(names), ("bucket-list", "bucket-read"))
        )
        if subject is not None:
            checks += [continuation_check(subject), margin_check(subject)]
        return run_checks(checks, self._policy)

    # -- names and paths --------------------------------------------------------------------------------------

    def _names(self) -> Names:
        chosen = BrokerNames(self._settings.archive.cluster, self._settings.archive.broker)
        if chosen.cluster and chosen.broker:
            return Names(chosen, "settings")
        with suppress(TieredError, OSError):
            return Names(names_of(self._settings, self._broker_store()), "the broker's store")
        with suppress(TieredError):
            archives = list_archives(self._root) if self._root is not None else []
            if len(archives) == 1:
                return Names(BrokerNames(*archives[0]), "the only archive")
        return Names(BrokerNames("", ""), "")

    def _named(self, found: Names) -> CheckFinding:
        names = found.names
        if not (names.cluster and names.broker):
            return not_checked("cluster and broker are unknown; give --cluster and --broker, or --store")
        where = (
            f"{self._root.url.rstrip('/')}/{archive_prefix(*_pair(names))}"
            if self._root is not None
            else "no URL"
        )
        return ok(f"cluster {names.cluster}, broker {names.broker} (from {found.origin}); archive: {where}")

    def _access_rules(self) -> CheckFinding:
        settings = self._settings
        if (problem := missing_rules(settings, self._conf)) is not None:
            return failed(problem.message, problem.hint)
        if not settings.serve.acl_file:
            return ok("clients need none" if settings.serve.advertise else "no clients are served")
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
        return store_checks(subject, StoreAccess(measure_disk))

    def _store_subject(self, names: BrokerNames, state_dir: Path | None) -> StoreSubject | None:
        if not self._has_store():
            return None
        settings = self._settings.pins
        store = store_path(self._settings, self._conf)
        usual = [store.with_name(f"{store.name}.tiered-pins")]
        if state_dir is not None:
            usual.insert(0, state_dir / "pins")
        places = [Path(settings.directory)] if settings.directory else usual
        return StoreSubject(
            self._broker_store,
            tuple(places),
            PinLimits().below_broker(self._conf or BrokerConf()),
            lambda: self._archived(names),
            settings.enabled,
        )

    def _archived(self, names: BrokerNames) -> tuple[ObjectStore, CatalogState] | None:
        if self._root is None or not (names.cluster and names.broker):
            return None
        archive = PrefixedStore(self._root, archive_prefix(*_pair(names)))
        try:
            return archive, load(archive)
        except NoArchiveError:
            return None

    def _archive(self, names: BrokerNames) -> CheckFinding:
        """What lies below the archive's prefix."""
        if self._root is None or not (names.cluster and names.broker):
            return not_checked("give ARCHIVE_URL, --cluster and --broker")
        store = PrefixedStore(self._root, archive_prefix(*_pair(names)))
        found, error = standing(store)
        if error is None:
            state = load(store)
            beyond = (one.key for one in objects_at_end(store, state, all_queues=True))
            for anomaly in newest_missing(store, state, beyond):
                return failed(f"{anomaly.key} {anomaly.detail}", REPAIR_HINT)
            return ok("whole: its newest state can be loaded")
        if found is Standing.EMPTY:
            return ok(f"empty: {error.message}; tiered run begins one")
        return failed(f"{found}: {error.message}", error.hint)

    def _liveness(self) -> LivenessReport | None:
        return ask_liveness(store_path(self._settings, self._conf)) if self._has_store() else None

    def _broker_subject(self, names: BrokerNames) -> BrokerSubject:
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
            clock_ms=wall_ms,
            largest_put_bytes=self._settings.object_store.multipart_threshold_bytes,
        )
        self._opened.callback(trial.remove)
        rules = (
            rule_checks(probe, self._policy.prefix) if probe is not None and self._policy is not None else []
        )
        return [*trial.checks(), *rules]


def _pair(names: BrokerNames) -> tuple[str, str]:
    return names.cluster, names.broker
