"""Opens the broker's configuration and store, and finds its names and address.

Precedence: settings, then broker.conf, then the store itself.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tiered.broker_store.bound import BrokerOffsets
from tiered.broker_store.commit_log import LogFile
from tiered.broker_store.conf import BrokerConf, BrokerNames, is_true, read_broker_conf, require_names
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.errors import TieredError, UnavailableError, UsageError
from tiered.model.address import host_and_port
from tiered.model.queue import TopicFilter
from tiered.remoting.client import BrokerClient
from tiered.remoting.credentials import Credentials, read_credentials
from tiered.remoting.tls import ClientTls, TlsOptions
from tiered.settings.sections import Settings
from uploader.bound_source import NO_ADDRESS

logger = logging.getLogger(__name__)


Connect = Callable[[str, float, Credentials | None, ClientTls | None], BrokerClient]


class BrokerOffsetsClient:
    """Reads the offsets of one broker; of none if ``address`` is empty. Not thread-safe.

    ``name``: the expected broker name, or empty. Another broker's offsets would be a wrong bound, or make the log look
    truncated.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
        *,
        name: str = "",
        connect: Connect = BrokerClient,
    ) -> None:
        """``timeout_s`` limits each request; ``credentials`` sign requests and ``tls`` secures the connection, where
        the broker requires them. ``connect`` makes the client at the first request, and again after each failure."""
        self.address = address
        self._timeout_s = timeout_s
        self._credentials, self._tls = credentials, tls
        self._connect = connect
        self._has_warned = False
        self._name = name
        self._client: BrokerClient | None = None
        self.silence = "" if address else NO_ADDRESS
        """Why the offsets are unknown; empty while the broker answers."""
        self._config: Mapping[str, str] = {}
        """The broker's configuration; empty if it is not known, or if the account may not read it."""

    @property
    def is_master(self) -> bool:
        """Whether the broker says that it is the master; false while it does not answer."""
        role = self._config.get("brokerRole", "")
        return not self.silence and role.endswith("MASTER") and self._config.get("brokerId", "0") == "0"

    def ask(self) -> BrokerOffsets | None:
        """The broker's present offsets; None if it does not answer or its address is not known. That is logged once,
        and ``silence`` has the reason."""
        if not self.address:
            if not self._has_warned:
                logger.warning(
                    "the broker's offsets are not known: set broker.address, or give --broker-conf"
                )
            self._has_warned = True
            return None
        try:
            offsets = self._read()
        except TieredError as error:
            self.close()
            if not self.silence:
                logger.warning("the broker at %s does not answer: %s", self.address, error)
            self.silence = f"it does not answer at {self.address} ({error.message})"
            return None
        if self.silence:
            logger.info("the broker at %s answers again", self.address)
        self.silence = ""
        return offsets

    def _read(self) -> BrokerOffsets:
        """Request the broker's offsets, and its configuration at the first request of each connection. Raises
        UnavailableError if it does not answer or has another name than expected."""
        if self._client is None:
            self._client = self._connect(self.address, self._timeout_s, self._credentials, self._tls)
            self._config = self._client.broker_config() or {}
            self._refuse_another(self._config)
        # This request is first, as it also finds out whether the broker answers at all.
        confirm_phys = self._client.confirm_offset()
        try:
            info = self._client.runtime_info()
        except UnavailableError:
            # Some brokers, such as one on IPv6, fail to answer this but report the confirm offset.
            if confirm_phys is None:
                raise
            info = {}
        return BrokerOffsets(
            max_phys=_number(info, "commitLogMaxOffset"),
            confirm_phys=confirm_phys,
            dispatch_behind_bytes=_number(info, "dispatchBehindBytes"),
            is_dispatch_certain=_is_dispatch_certain(self._config, info, confirm_phys),
            config=self._config,
            version=info.get("brokerVersionDesc", ""),
        )

    def _refuse_another(self, config: Mapping[str, str]) -> None:
        """Raise UnavailableError if the broker has another name than the store: its offsets would belong to another
        log. Without the right to read the broker's configuration the name is not checked."""
        name = config.get("brokerName", "") if self._name else ""
        if name not in ("", self._name):
            raise UnavailableError(
                f"the broker at {self.address} is {name}, but the store is that of {self._name}",
                hint="correct broker.address, or brokerIP1 and listenPort of broker.conf",
            )

    def close(self) -> None:
        """Disconnect; the next request connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None


def _is_dispatch_certain(
    config: Mapping[str, str], info: Mapping[str, str], confirm_phys: int | None
) -> bool:
    """Whether the broker's dispatchBehindBytes tells exactly up to where its consume queues are written. A broker of
    5.x counts from a confirm offset of its own (ReputMessageService.behind), which in some configurations is not the
    end of the log; with enableBuildConsumeQueueConcurrently it counts records as dispatched before their units are
    written."""
    if not config:
        return confirm_phys is None  # only a broker of 5.x reports one
    if "enableControllerMode" not in config:
        return True  # 4.9 counts from the end of the log
    uncertain = "enableControllerMode", "duplicationEnable", "enableBuildConsumeQueueConcurrently"
    if "true" in (config.get(name) for name in uncertain):
        return False
    return config.get("flushDiskType") != "SYNC_FLUSH" or info.get("remainHowManyDataToFlush") == "0 B"


def _number(info: dict[str, str], name: str) -> int | None:
    text = info.get(name, "")
    return int(text) if text.lstrip("-").isdecimal() else None


def read_conf(settings: Settings) -> BrokerConf | None:
    """The broker.conf that the settings name, if any."""
    path = settings.broker.conf_path
    return read_broker_conf(Path(path)) if path else None


def checks_clients(conf: BrokerConf | None) -> bool:
    """Whether the broker has access control; assumed if there is no configuration file."""
    if conf is None:
        return True
    switches = ("aclEnable", "authenticationEnabled", "authorizationEnabled")
    return any(is_true(conf.properties, name) for name in switches)


def missing_rules(settings: Settings, conf: BrokerConf | None) -> UsageError | None:
    """The error if proxy or slave mode is on but must not serve clients, as the broker checks their accounts by rules
    (an ACL) that this process does not have; None if they can be served."""
    if not (settings.serve.advertise or settings.slave.advertise):
        return None
    key = "serve.advertise" if settings.serve.advertise else "slave.advertise"
    if settings.serve.acl_file or not checks_clients(conf):
        return None
    if conf is None:
        return UsageError(
            f"{key} requires broker.conf, which shows whether the broker has access control",
            hint="set broker.conf_path, or serve.acl_file to the broker's rules",
        )
    return UsageError(
        f"{key} requires serve.acl_file: the broker has access control, whose rules apply to archived messages too",
        hint="set serve.acl_file to a copy of conf/plain_acl.yml (4.9), or of what `tiered config acl-from-broker` "
        "prints (5.x)",
    )


def store_path(settings: Settings, conf: BrokerConf | None) -> Path:
    """The broker's store directory: of the settings, else of broker.conf. Raises UsageError if neither names it."""
    if settings.broker.store_path:
        return Path(settings.broker.store_path)
    if conf is not None and conf.store_path is not None:
        return conf.store_path
    raise UsageError(
        "the broker's store directory is not known: neither broker.store_path nor storePathRootDir of a broker.conf is "
        "set",
        hint="give --store DIRECTORY or --broker-conf FILE",
    )


def pin_directories(
    settings: Settings, conf: BrokerConf | None, state_dir: Path | None
) -> tuple[list[Path], list[Path]]:
    """The directories for hard links to the broker's commitlog files (pins), which must be on the same file system as
    the store: those to be used, the first that works, and those that `tiered run` may have used before with other
    settings. ``state_dir``: None if it is not known."""
    store = store_path(settings, conf)
    own = [] if state_dir is None else [state_dir / "pins"]
    default = [*own, store.with_name(f"{store.name}.tiered-pins")]
    return ([Path(settings.pins.directory)], default) if settings.pins.directory else (default, [])


def open_store_of(
    settings: Settings,
    conf: BrokerConf | None,
    pinned: Callable[[], Iterable[LogFile]] | None = None,
) -> BrokerStore:
    """Open the broker's store for reading. ``pinned`` returns commitlog files that hard links keep although the broker
    has deleted them. Raises what open_broker_store raises."""
    return open_broker_store(store_path(settings, conf), conf=conf, pinned=pinned)


def names_of(settings: Settings, store: BrokerStore) -> BrokerNames:
    """The names of cluster and broker: each one of the settings, else as the store's own files have it. Raises
    UsageError if one is not known."""
    chosen = BrokerNames(settings.archive.cluster, settings.archive.broker)
    if not (chosen.cluster and chosen.broker):
        found = store.names()
        chosen = replace(
            chosen, cluster=chosen.cluster or found.cluster, broker=chosen.broker or found.broker
        )
    return require_names(chosen, str(store.path))


def credentials_of(settings: Settings) -> Credentials | None:
    """The account for requests to the broker, if configured. Raises UsageError for an unusable file."""
    path = settings.broker.credentials_file
    return read_credentials(Path(path)) if path else None


def tls_of(settings: Settings) -> ClientTls | None:
    """TLS for the broker and its name servers; None: plain. Raises UsageError for files that do not load."""
    return TlsCache().of(settings)


class TlsCache:
    """TLS of one process. Loaded certificates stay in use if a later job finds their files unusable."""

    def __init__(self) -> None:
        self._kept: ClientTls | None = None

    def of(self, settings: Settings) -> ClientTls | None:
        """The TLS of connections to broker and name servers; None if broker.tls is off. Certificate files are read when
        the settings that name them change. Raises UsageError for files that do not load."""
        broker = settings.broker
        options = TlsOptions(
            broker.tls_verify,
            broker.tls_ca,
            broker.tls_certificate,
            broker.tls_key,
            broker.tls_key_password_file,
        )
        if not broker.tls:
            self._kept = None
        elif self._kept is None or self._kept.options != options:
            self._kept = ClientTls(options)
        return self._kept


def address_of(settings: Settings, conf: BrokerConf | None) -> str:
    """``host:port`` of the broker's remoting port; empty if unknown. Raises UsageError for an invalid one."""
    address = settings.broker.address or (conf.address if conf is not None else "")
    if address and host_and_port(address) is None:
        raise UsageError(
            f"broker.address = {address} is not an address",
            hint="set it to host:port, such as 127.0.0.1:10911",
        )
    return address


def name_servers_of(settings: Settings, conf: BrokerConf | None) -> tuple[str, ...]:
    """The broker's name servers, by the settings or by broker.conf."""
    listed = conf.properties.get("namesrvAddr", "") if conf is not None else ""
    return settings.broker.name_servers or tuple(filter(None, re.split(r"[;,\s]+", listed)))


def topic_filter_of(settings: Settings, conf: BrokerConf | None, cluster: str, broker: str) -> TopicFilter:
    """The topics of this broker to archive; its system topics are known by name."""
    found = settings.topics.topic_filter(cluster, broker, "" if conf is None else conf.trace_topic)
    return replace(found, timer_topic=settings.timers.topic)
