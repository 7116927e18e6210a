"""Reads broker.conf: the broker properties on which an archive depends.

Owns the syntax (java.util.Properties) and the broker's defaults. Sources: org.apache.rocketmq.common.BrokerConfig,
org.apache.rocketmq.store.config.MessageStoreConfig.

Finds the names of broker and cluster: in broker.conf, else by topics named after them.

Pure. The names decide where the archive is, so an ambiguous name is an error. Sources:
org.apache.rocketmq.broker.topic.TopicConfigManager, org.apache.rocketmq.common.MixAll.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered.consume_queue.store import StoreKind
from tiered.errors import AccessDeniedError, NotFoundError, UsageError
from tiered.model.queue import SYSTEM_TOPICS

DELAY_LEVELS_DEFAULT: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_KEY = re.compile(r"((?:[^\\:=\s]|\\.)*)[ \t\f]*(?:[:=][ \t\f]*)?", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_CONTROL: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@dataclass(frozen=True)
class BrokerConf:
    """A broker's configuration. Ratios are shares of the disk used, 0 to 1."""

    cluster: str = ""
    broker: str = ""
    broker_id: int = 0
    role: str = "ASYNC_MASTER"
    store_path: Path | None = None
    commitlog_paths: tuple[Path, ...] = ()
    broker_ip: str = ""
    listen_port: int = 10911
    store_type: str = "default"
    delay_levels: str = DELAY_LEVELS_DEFAULT
    file_reserved_hours: int = 72
    delete_when_hours: tuple[int, ...] = (4,)
    disk_max_used_ratio: float = 0.75
    disk_clean_forcibly_ratio: float = 0.85
    disk_warning_ratio: float = 0.90
    is_dledger: bool = False
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """``host:port`` of the broker's remoting port; empty without brokerIP1."""
        return f"{self.broker_ip}:{self.listen_port}" if self.broker_ip else ""

    @property
    def trace_topic(self) -> str:
        """The broker's trace topic, which may have any name; empty if disabled (TopicConfigManager: traceTopicEnable,
        msgTraceTopicName)."""
        is_kept = is_true(self.properties, "traceTopicEnable")
        return self.properties.get("msgTraceTopicName", "").strip() if is_kept else ""

    @property
    def is_slave(self) -> bool:
        """Whether this broker is configured as a slave."""
        return self.role == "SLAVE"

    @property
    def reads_rocksdb_queues(self) -> bool:
        """Whether the broker reads its consume queues from RocksDB. It may write both kinds
        (CombineConsumeQueueStore), and the files of a trial remain."""
        wanted = self.store_type
        if is_true(self.properties, "rocksdbCQDoubleWriteEnable"):
            wanted = self.properties.get("combineCQPreferCQType", "").strip() or wanted
        return wanted.lower() == "defaultrocksdb"

    @property
    def queue_kind(self) -> StoreKind:
        """Where the broker writes its consume queues."""
        if is_true(self.properties, "rocksdbCQDoubleWriteEnable"):
            return StoreKind.BOTH
        return StoreKind.ROCKSDB if self.reads_rocksdb_queues else StoreKind.FILE

    @property
    def keeps_lmqs_in_rocksdb(self) -> bool:
        """Whether LMQs are in RocksDB only, wherever the others are."""
        names = ("rocksdbCQDoubleWriteEnable", "combineCQUseRocksdbForLmq")
        return all(is_true(self.properties, name) for name in names)

    @property
    def delay_levels_ms(self) -> NDArray[np.int64]:
        """Delay of level 1, 2, … in ms: see ``parse_delay_levels``."""
        return parse_delay_levels(self.delay_levels)


def read_broker_conf(path: Path) -> BrokerConf:
    """Read the broker's configuration from the file ``path``. Raises NotFoundError or AccessDeniedError if it cannot be
    read, and UsageError naming file and key for a wrong value."""
    try:
        # As java.util.Properties reads a stream: a comment may be in any encoding.
        text = path.read_text("latin-1")
    except FileNotFoundError as error:
        raise NotFoundError(f"broker configuration {path} does not exist") from error
    except OSError as error:
        raise AccessDeniedError(f"broker configuration {path} cannot be read: {error.strerror}") from error
    try:
        return broker_conf(parse_java_properties(text))
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def broker_conf(properties: Mapping[str, str]) -> BrokerConf:
    """The configuration that the ``properties`` of a broker.conf make, with the broker's own defaults for the rest.
    Raises UsageError naming the key of a wrong value."""
    store_path = _path(properties, "storePathRootDir")
    commitlog = properties.get("storePathCommitLog", "").strip()
    read_only = properties.get("readOnlyCommitLogStorePaths", "").strip()
    paths = [Path(part.strip()) for part in f"{commitlog},{read_only}".split(",") if part.strip()]
    return BrokerConf(
        cluster=properties.get("brokerClusterName", "").strip(),
        broker=properties.get("brokerName", "").strip(),
        broker_id=integer_property(properties, "brokerId", 0),
        role=properties.get("brokerRole", "ASYNC_MASTER").strip(),
        store_path=store_path,
        commitlog_paths=tuple(dict.fromkeys(paths)),
        broker_ip=properties.get("brokerIP1", "").strip(),
        listen_port=integer_property(properties, "listenPort", 10911),
        store_type=properties.get("storeType", "default").strip(),
        delay_levels=_delay_levels(properties),
        file_reserved_hours=integer_property(properties, "fileReservedTime", 72),
        delete_when_hours=_hours(properties),
        disk_max_used_ratio=_percent(properties, "diskMaxUsedSpaceRatio", 75, 10, 95),
        disk_clean_forcibly_ratio=_percent(properties, "diskSpaceCleanForciblyRatio", 85, 30, 85),
        disk_warning_ratio=_percent(properties, "diskSpaceWarningLevelRatio", 90, 35, 90),
        is_dledger=is_true(properties, "enableDLegerCommitLog"),
        properties=dict(properties),
    )


def is_true(properties: Mapping[str, str], name: str) -> bool:
    """Whether a switch with default false is true."""
    return properties.get(name, "").strip().lower() == "true"


def parse_java_properties(text: str) -> dict[str, str]:
    """The keys and values of ``text`` in the format of java.util.Properties: with comments, lines that continue behind
    a backslash, and escapes. The last of equal keys counts."""
    found: dict[str, str] = {}
    pending = ""
    for written_line in re.split(r"\r\n|\r|\n", text):
        line = pending + written_line.lstrip(" \t\f")
        if not pending and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:  # two are an escaped one
            pending = line[:-1]
            continue
        pending = ""
        _add_property(found, line)
    if pending:
        _add_property(found, pending)
    return found


def parse_delay_levels(levels: str) -> NDArray[np.int64]:
    """The delays in ms that ``levels``, a value of messageDelayLevel such as "1s 5s 10s", gives the delay levels, level
    1 first. Raises UsageError for a wrong one."""
    delays = []
    for part in levels.split():
        unit, number = part[-1], part[:-1]
        if unit not in _UNIT_MS or not number.isdecimal():
            raise UsageError(
                f"messageDelayLevel of broker.conf contains {part}, which is not a time",
                hint="use a number and a unit s, m, h or d, such as 30s",
            )
        delays.append(int(number) * _UNIT_MS[unit])
    return np.array(delays, np.int64)


def _add_property(found: dict[str, str], line: str) -> None:
    """Add the key and value of ``line`` to ``found``."""
    match = _KEY.match(line)
    assert match is not None  # the pattern matches the empty string
    found[_unescape(match[1])] = _unescape(line[match.end() :])


def _unescape(text: str) -> str:
    """``text`` with the characters that its escapes, such as ``\\t`` and ``\\u00e4``, stand for."""

    def replace(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _CONTROL.get(code, code)

    return _ESCAPE.sub(replace, text)


def _path(properties: Mapping[str, str], key: str) -> Path | None:
    value = properties.get(key, "").strip()
    return Path(value) if value else None


def integer_property(properties: Mapping[str, str], key: str, default: int) -> int:
    """The integer ``key`` of broker.conf as the broker reads it; ``default`` if it is not set. Raises UsageError naming
    the key if it is no integer."""
    value = properties.get(key, "")
    if not value.strip():
        return default
    try:
        number = int(value)
        # A trailing blank makes the broker ignore the value and use its default (MixAll.properties2Object).
        return number if value == value.strip() else default
    except ValueError as error:
        raise UsageError(f"{key} = {value} of broker.conf is not an integer") from error


def _percent(properties: Mapping[str, str], key: str, default: int, least: int, most: int) -> float:
    """The percentage ``key`` as a share of 1, at least ``least`` and at most ``most`` percent, as the broker limits it
    too (MessageStoreConfig.getDiskMaxUsedSpaceRatio, CleanCommitLogService)."""
    return min(max(integer_property(properties, key, default), least), most) / 100


def _hours(properties: Mapping[str, str]) -> tuple[int, ...]:
    """The hours of the day at which the broker deletes files, of ``deleteWhen``; 4 o'clock if it is not set. Raises
    UsageError for anything that is not a list of hours."""
    value = properties.get("deleteWhen", "04").strip() or "04"
    hours = [part.strip() for part in value.split(";") if part.strip()]
    if not all(hour.isdecimal() and int(hour) < 24 for hour in hours):
        raise UsageError(
            f"deleteWhen = {value} of broker.conf is not a list of hours",
            hint="use hours from 00 to 23, such as 04 or 04;16",
        )
    return tuple(int(hour) for hour in hours)


def _delay_levels(properties: Mapping[str, str]) -> str:
    levels = properties.get("messageDelayLevel", "").strip() or DELAY_LEVELS_DEFAULT
    parse_delay_levels(levels)
    return levels


REPLY_SUFFIX: Final = "_REPLY_TOPIC"
SYNC_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"
_PERM_INHERIT: Final = 1


@dataclass(frozen=True)
class BrokerNames:
    """Names; empty if unknown."""

    cluster: str
    broker: str


def find_names(conf: BrokerConf | None, topics: Mapping[str, Mapping[str, Any]]) -> BrokerNames:
    """Names from ``conf``, else from the topic table; empty unless exactly one is found."""
    cluster = (conf.cluster if conf is not None else "") or _cluster(topics)
    broker = (conf.broker if conf is not None else "") or _broker(topics, cluster)
    return BrokerNames(cluster, broker)


def require_names(names: BrokerNames, store: str) -> BrokerNames:
    """``names`` if both are known; ``store`` is where they were searched. Raises UsageError, with the flags to give, if
    one is missing."""
    missing = [name for name, value in (("cluster", names.cluster), ("broker", names.broker)) if not value]
    if missing:
        raise UsageError(
            f"the name of the {' and of the '.join(missing)} cannot be found in {store}",
            hint="give --broker-conf FILE, or " + " and ".join(f"--{name} NAME" for name in missing),
        )
    return names


def _cluster(topics: Mapping[str, Mapping[str, Any]]) -> str:
    """The cluster's name, which the name of its reply topic contains; empty if none or several names are found."""
    names = [name.removesuffix(REPLY_SUFFIX) for name in topics if name.endswith(REPLY_SUFFIX)]
    # The broker also has a topic of the cluster's name; a user's topic may end like a reply topic.
    return _only([name for name in names if name in topics]) or _only(names)


def _broker(topics: Mapping[str, Mapping[str, Any]], cluster: str) -> str:
    """The broker's name, which topics that the broker makes for itself contain; empty if none or several names are
    found. ``cluster``: the cluster's name, whose topic looks alike."""
    members = [
        name.removeprefix(SYNC_MEMBER_PREFIX) for name in topics if name.startswith(SYNC_MEMBER_PREFIX)
    ]
    if members:
        return _only(members)
    # 4.9 has no such topic, but one of the broker's name: a single queue whose permissions others inherit.
    return _only(
        [
            name
            for name, config in topics.items()
            if name not in SYSTEM_TOPICS and name != cluster and _is_named_after_broker(config)
        ]
    )


def _is_named_after_broker(config: Mapping[str, Any]) -> bool:
    """Whether a topic with this configuration looks like the one that a broker names after itself."""
    permission = config.get("perm", 0)
    one_queue = config.get("readQueueNums") == 1 and config.get("writeQueueNums") == 1
    return one_queue and isinstance(permission, int) and bool(permission & _PERM_INHERIT)


def _only(names: list[str]) -> str:
    """The single one of ``names``; empty if there are none or several."""
    return names[0] if len(names) == 1 else ""
