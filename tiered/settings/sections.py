"""The settings that exist: one frozen dataclass per component, one section of the TOML file each.

Owns names, defaults, meanings and limits, and the rules that tie two values together. Does not own reading
files or the environment (load.py), nor the components themselves. Sizes are bytes, times milliseconds, unless
the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiered.model.queue import TopicFilter
from tiered.settings.fields import setting

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class BrokerSettings:
    """The broker beside which the sidecar runs."""

    store_path: str = setting("", "the broker's storePathRootDir", restart=True)
    commitlog_paths: tuple[str, ...] = setting(
        (), "commitlog directories when they are not below the store (storePathCommitLog)", restart=True
    )
    conf_path: str = setting("", "the broker's broker.conf: names, paths, disk thresholds, delay levels")
    address: str = setting(
        "", "host:port of the broker's remoting port; empty: brokerIP1:listenPort of broker.conf"
    )
    request_timeout_ms: int = setting(3_000, "time limit of one request to the broker", minimum=50)


@dataclass(frozen=True)
class ArchiveSettings:
    """Where the archive is and whose it is."""

    url: str = setting("", "file:///directory or s3://bucket/prefix", restart=True)
    cluster: str = setting("", "cluster name; empty: from broker.conf or the store", restart=True)
    broker: str = setting("", "broker name; empty: from broker.conf or the store", restart=True)
    take_over: bool = setting(
        False, "claim the archive at start even though another instance is its writer (fences it)"
    )


@dataclass(frozen=True)
class TopicSettings:
    """Which topics are archived: include, then exclude, as shell patterns."""

    include: tuple[str, ...] = setting(("*",), "patterns of topics to archive")
    exclude: tuple[str, ...] = setting((), "patterns of topics not to archive; wins over include")
    include_system: bool = setting(False, "archive RocketMQ's own topics too")

    def topic_filter(self, cluster: str, broker: str) -> TopicFilter:
        """The filter these settings mean for one broker."""
        return TopicFilter(self.include, self.exclude, self.include_system, cluster, broker)


@dataclass(frozen=True)
class OffloadSettings:
    """The upload path: batching, encoding, attempts, memory, polling."""

    batch_bytes: int = setting(
        32 * MIB, "a cycle closes at this many bytes of commitlog", minimum=64 * KIB, maximum=1 * GIB
    )
    batch_age_ms: int = setting(
        5_000, "a cycle closes when its oldest byte is this old", minimum=1, maximum=HOUR_MS
    )
    split_bytes: int = setting(
        16 * MIB, "a queue's run of at least this size becomes an object of its own", minimum=64 * KIB
    )
    block_bytes: int = setting(
        512 * KIB, "uncompressed bytes of a block, the unit of reading", minimum=4 * KIB, maximum=64 * MIB
    )
    compression_level: int = setting(1, "zstd level", minimum=1, maximum=19)
    upload_threads: int = setting(4, "objects in flight at once", minimum=1, maximum=64)
    attempt_timeout_ms: int = setting(
        30_000, "an upload unanswered for this long is abandoned", minimum=100, maximum=HOUR_MS
    )
    memory_budget_bytes: int = setting(384 * MIB, "all buffers together never exceed this", minimum=32 * MIB)
    poll_min_ms: int = setting(1, "shortest wait between looks at a growing commitlog", minimum=1)
    poll_max_ms: int = setting(100, "longest wait between looks at an idle one", minimum=1, maximum=60_000)
    root_every: int = setting(64, "commits between two root pages of the catalog", minimum=1, maximum=10_000)
    compress_threads: int = setting(2, "threads that compress", minimum=1, maximum=64)


@dataclass(frozen=True)
class ObjectStoreSettings:
    """How the object store is reached. Credentials are never settings: they come from the SDK's own chain."""

    endpoint_url: str = setting("", "S3 endpoint when it is not AWS, such as http://127.0.0.1:9000")
    region: str = setting("", "region; empty: from the SDK's own chain")
    addressing_style: str = setting("auto", "how a bucket is addressed", choices=("auto", "path", "virtual"))
    multipart_threshold_bytes: int = setting(
        64 * MIB, "larger objects are sent in parts", minimum=5 * MIB, maximum=5 * GIB
    )
    multipart_part_bytes: int = setting(16 * MIB, "size of a part", minimum=5 * MIB, maximum=5 * GIB)
    connect_timeout_ms: int = setting(5_000, "time limit of connecting", minimum=50)
    read_timeout_ms: int = setting(30_000, "time limit of waiting for an answer to a read", minimum=50)
    upload_bytes_per_s: int = setting(0, "upload bandwidth limit; 0: none", minimum=0)
    trusted_network: bool = setting(
        False, "send bodies unsigned over plain http too: saves CPU on a link nobody else can reach"
    )


@dataclass(frozen=True)
class PinSettings:
    """Hard links that keep commitlog files readable until they are archived."""

    enabled: bool = setting(True, "pin files that are not yet archived")
    directory: str = setting(
        "", "where links are made, on the commitlog's disk; empty: state directory, else beside the store"
    )
    create_below_ratio: float = setting(
        0.65, "no new pin when this share of the disk is used", minimum=0.0, maximum=1.0
    )
    release_above_ratio: float = setting(
        0.72, "all pins go, oldest first, above this share of the disk", minimum=0.0, maximum=1.0
    )


@dataclass(frozen=True)
class AdminSettings:
    """The admin HTTP server: /metrics, /health, /ready, /status.json."""

    host: str = setting("127.0.0.1", "address to listen on", restart=True)
    port: int = setting(10919, "port; 0: any free one", minimum=0, maximum=65_535, restart=True)


@dataclass(frozen=True)
class ProcessSettings:
    """The process itself."""

    state_dir: str = setting(
        "", "lock, admin address, pins; empty: $XDG_STATE_HOME/rocketmq-tiered/<broker>", restart=True
    )
    drain_timeout_ms: int = setting(
        30_000, "after SIGTERM, how long to finish what is in flight", minimum=0, maximum=10 * 60_000
    )
    patience_ms: int = setting(
        60_000, "a back-fill gives up when the object store has refused everything for this long", minimum=0
    )
    when_fenced: str = setting(
        "standby",
        "once another writer owns the archive: wait as its standby, or exit with code 5",
        choices=("standby", "exit"),
    )
    standby_retry_ms: int = setting(
        30_000, "as standby, how often to ask whether the archive may be taken over", minimum=100
    )
    log_level: str = setting(
        "info", "least severe level logged", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True)
class GcSettings:
    """Removing garbage."""

    grace_ms: int = setting(
        72 * HOUR_MS, "a doomed object is kept this long after the commit that doomed it", minimum=0
    )


@dataclass(frozen=True)
class Settings:
    """All components' settings. Field names are the section names."""

    broker: BrokerSettings = field(default_factory=BrokerSettings)
    archive: ArchiveSettings = field(default_factory=ArchiveSettings)
    topics: TopicSettings = field(default_factory=TopicSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    object_store: ObjectStoreSettings = field(default_factory=ObjectStoreSettings)
    pins: PinSettings = field(default_factory=PinSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    process: ProcessSettings = field(default_factory=ProcessSettings)
    gc: GcSettings = field(default_factory=GcSettings)


SECTIONS: dict[str, type[Any]] = {
    "broker": BrokerSettings,
    "archive": ArchiveSettings,
    "topics": TopicSettings,
    "offload": OffloadSettings,
    "object_store": ObjectStoreSettings,
    "pins": PinSettings,
    "admin": AdminSettings,
    "process": ProcessSettings,
    "gc": GcSettings,
}

NOT_IN_FORCE: dict[str, str] = {
    "retention": "nothing expires yet: messages stay until the archive is deleted",
    "retention.ttl": "nothing expires yet: messages stay until the archive is deleted",
    "serving": "clients cannot pull from the archive yet: read it with `tiered cat`",
    "compaction": "segments are not merged yet",
    "encryption": "objects are stored unencrypted by this program: use the bucket's own encryption",
    "offload.dictionary": "blocks are compressed without a dictionary",
}
"""Planned names that this version does not obey yet, and what is true instead. Refused, never ignored."""


def contradictions(settings: Settings) -> list[tuple[str, str]]:
    """Pairs (key, complaint) for values that are fine alone but impossible together."""
    offload, pins = settings.offload, settings.pins
    found: list[tuple[str, str]] = []
    if offload.poll_min_ms > offload.poll_max_ms:
        found.append(("offload.poll_min_ms", "must not exceed offload.poll_max_ms"))
    if offload.block_bytes > offload.batch_bytes:
        found.append(("offload.block_bytes", "must not exceed offload.batch_bytes"))
    if offload.memory_budget_bytes < 3 * offload.batch_bytes:
        found.append((
            "offload.memory_budget_bytes",
            f"must be at least 3 × offload.batch_bytes = {3 * offload.batch_bytes}: one batch is read, "
            "one encoded, one uploaded at a time",
        ))  # fmt: skip
    if pins.create_below_ratio >= pins.release_above_ratio:
        found.append(("pins.create_below_ratio", "must be less than pins.release_above_ratio"))
    return found
