"""The settings that exist: one frozen dataclass per component, one section of the TOML file each.

Owns names, defaults, meanings and limits, and the rules that tie values of one component together. Does not own reading
files or the environment (load.py), nor the components themselves. Sizes are bytes, times milliseconds, unless
the name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiered.model.queue import TopicFilter
from tiered.settings.declaration import setting

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
    name_servers: tuple[str, ...] = setting(
        (), "name servers as host:port; empty: namesrvAddr of broker.conf", restart=True
    )
    credentials_file: str = setting(
        "",
        "accessKey and secretKey of an account of a broker that checks who asks, as in mqadmin's conf/tools.yml; "
        "empty: what we ask is not signed",
        restart=True,
    )
    request_timeout_ms: int = setting(
        3_000, "time limit of one request to the broker", minimum=50, maximum=HOUR_MS
    )
    tls: bool = setting(False, "dial the broker and the name servers with TLS", restart=True)
    tls_ca: str = setting(
        "",
        "PEM file of the CAs that signed their certificates, or of these themselves; empty: the CAs of the system. "
        "Read anew when it changes, as the other files are",
        restart=True,
    )
    tls_verify: str = setting(
        "full",
        "what is checked of their certificates. full: who signed, time and host; ca: not the host; none: nothing, so "
        "that anybody in between may read along",
        choices=("full", "ca", "none"),
        restart=True,
    )
    tls_certificate: str = setting(
        "", "PEM file of the certificate chain that they are shown when they ask for one", restart=True
    )
    tls_key: str = setting("", "PEM file of its key; empty: it is in that file", restart=True)
    tls_key_password_file: str = setting(
        "", "file with the password of that key in its first line; empty: it is not encrypted", restart=True
    )

    def complaints(self) -> list[tuple[str, str]]:
        """What is impossible together. TLS that is meant and not on would be seen by nobody."""
        of_certificate = ("tls_key", "tls_key_password_file")
        if self.tls:
            return [] if self.tls_certificate else [
                (f"broker.{name}", "is of broker.tls_certificate, which is not set")
                for name in of_certificate if getattr(self, name)
            ]  # fmt: skip
        set_in_vain = [name for name in ("tls_ca", "tls_certificate", *of_certificate) if getattr(self, name)]
        return [(f"broker.{name}", "is in force with broker.tls = true only") for name in set_in_vain]


@dataclass(frozen=True)
class ArchiveSettings:
    """Where the archive is and whose it is."""

    url: str = setting("", "file:///directory or s3://bucket/prefix", restart=True)
    cluster: str = setting("", "cluster name; empty: from broker.conf or the store", restart=True)
    broker: str = setting("", "broker name; empty: from broker.conf or the store", restart=True)
    take_over: bool = setting(
        False, "claim the archive at start even though another instance is its writer (fences it)"
    )
    replace_log: bool = setting(
        False,
        "back-fill a store whose log does not go on from what is archived under its name (another broker's, an older "
        "copy, a lost end): what of that is not in this log is shown no more",
    )


@dataclass(frozen=True)
class TopicSettings:
    """Which topics are archived: include, then exclude, as shell patterns."""

    include: tuple[str, ...] = setting(("*",), "patterns of topics to archive")
    exclude: tuple[str, ...] = setting((), "patterns of topics not to archive; wins over include")
    include_system: bool = setting(False, "archive RocketMQ's own topics too")

    def topic_filter(self, cluster: str, broker: str, trace_topic: str = "") -> TopicFilter:
        """The filter these settings mean for one broker. ``trace_topic``: see TopicFilter."""
        return TopicFilter(self.include, self.exclude, self.include_system, cluster, broker, trace_topic)


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
    memory_budget_bytes: int = setting(
        384 * MIB,
        "all buffers together never exceed this; keys come on top, 8 bytes each, where messages have thousands",
        minimum=32 * MIB,
    )
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
    connect_timeout_ms: int = setting(5_000, "time limit of connecting", minimum=50, maximum=HOUR_MS)
    read_timeout_ms: int = setting(
        30_000, "time limit of waiting for an answer to a read", minimum=50, maximum=HOUR_MS
    )
    upload_bytes_per_s: int = setting(0, "upload bandwidth limit; 0: none", minimum=0)
    trusted_network: bool = setting(
        False, "send bodies unsigned over plain http too: saves CPU on a link nobody else can reach"
    )


@dataclass(frozen=True)
class PinSettings:
    """Hard links that keep commitlog files readable until they are archived."""

    enabled: bool = setting(True, "pin files that are not yet archived")
    directory: str = setting(
        "",
        "where links are made, this broker's only, on its commitlog's disk; empty: state directory or beside the store",
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

    grace_ms: int = setting(72 * HOUR_MS, "how long garbage is kept before gc deletes it", minimum=0)


@dataclass(frozen=True)
class IndexSettings:
    """The message index: when new segments are indexed, and how its files are merged."""

    enabled: bool = setting(True, "build index files; without them every query reads all key sections")
    unindexed_objects_max: int = setting(
        64, "segments not indexed yet at which a new index file is made", minimum=1, maximum=10_000
    )
    after_backfill: bool = setting(
        False, "index every segment at the end of a back-fill, not only once there are unindexed_objects_max"
    )
    merge_files: int = setting(8, "this many files of one day are merged into one", minimum=2, maximum=64)
    memory_bytes: int = setting(
        64 * MIB,
        "memory for building and merging index files, beside the keys of one object (8 bytes each)",
        minimum=1 * MIB,
        maximum=4 * GIB,
    )
    work_dir: str = setting(
        "", "where larger index files are put together; empty: the system's temporary directory"
    )
    retry_ms: int = setting(30_000, "after a failure, when to try again", minimum=100, maximum=HOUR_MS)


READ_POLICIES = ("DISABLE", "NOT_IN_DISK", "NOT_IN_MEM", "FORCE")
"""By RocketMQ's level, 0 to 3."""


@dataclass(frozen=True)
class ReadSettings:
    """What is read from the archive although the broker may still have it. A reload applies at the next read."""

    policy: str = setting(
        "NOT_IN_DISK",
        "when the archive is read: DISABLE never, NOT_IN_DISK when the broker's files no longer have the message, "
        "NOT_IN_MEM also when its memory has not, FORCE always (tieredStorageLevel, also 0 to 3)",
        live=True,
    )
    topic_policies: tuple[str, ...] = setting(
        (), 'policies of topics, as "pattern=policy"; the first pattern that fits wins', live=True
    )
    local_threads: int = setting(4, "threads that read the broker's files", minimum=1, maximum=64)
    local_refresh_ms: int = setting(
        1_000, "how often the broker's directories are looked at for new and deleted files", minimum=10
    )

    def default_policy(self) -> str:
        """One of READ_POLICIES."""
        return _read_policy(self.policy) or self.policy

    def patterns(self) -> tuple[tuple[str, str], ...]:
        """(topic pattern, one of READ_POLICIES), in order."""
        pairs = (text.rpartition("=") for text in self.topic_policies)
        return tuple((pattern, _read_policy(name) or name) for pattern, _, name in pairs)

    def complaints(self) -> list[tuple[str, str]]:
        """Pairs (key, complaint), as ``contradictions`` gives."""
        found = []
        wanted = f"use one of {', '.join(READ_POLICIES)}"
        if _read_policy(self.policy) is None:
            found.append(("read.policy", wanted))
        for pattern, name in self.patterns():
            if not pattern or name not in READ_POLICIES:
                found.append(("read.topic_policies", f'write "pattern=policy"; {wanted}'))
        return found


def _read_policy(text: str) -> str | None:
    text = text.strip().upper()
    if text in ("0", "1", "2", "3"):
        return READ_POLICIES[int(text)]
    return text if text in READ_POLICIES else None


@dataclass(frozen=True)
class ServeSettings:
    """Serving an archive to RocketMQ clients."""

    bind: str = setting(
        "127.0.0.1:9876", "address to listen on, as host:port; port 0: any free one", restart=True
    )
    advertise: str = setting(
        "",
        "host:port that clients dial, as routes name it. tiered run serves clients only if it is set; "
        "tiered serve: empty for the address bound, or this machine's where that is 0.0.0.0",
        restart=True,
    )
    refresh_ms: int = setting(1_000, "how often to look for new commits of the archive", minimum=50)
    hold_ms_max: int = setting(
        20_000,
        "a pull that finds nothing waits at most this long for new messages",
        minimum=0,
        maximum=25_000,
    )
    pull_messages_max: int = setting(1_024, "messages of one answer", minimum=1, maximum=32_768)
    pull_bytes_max: int = setting(
        4 * MIB,
        "bytes of one answer; a single larger message goes alone",
        minimum=64 * 1024,
        maximum=15 * MIB,
    )
    connections_max: int = setting(10_000, "open connections", minimum=1, maximum=1_000_000, restart=True)
    requests_max: int = setting(
        4_096, "requests of one connection at work at once, waiting pulls included", minimum=1
    )
    lease_ms: int = setting(
        60_000,
        "consumer groups may be taken over from a server not seen for this long",
        minimum=1_000,
        restart=True,
    )
    retry_bytes_max: int = setting(
        64 * MIB,
        "memory of messages sent back by consumers and of dead letters, which are under state/serve/ too; above it "
        "none is taken",
        minimum=MIB,
        restart=True,
    )
    dead_letter_keep_ms: int = setting(
        30 * 24 * HOUR_MS,
        "dead letters of groups served here are kept this long",
        minimum=HOUR_MS,
        restart=True,
    )
    accept_proxy: bool = setting(
        False, "accept PROXY protocol headers (v1, v2) from a load balancer", restart=True
    )
    tls_certificate: str = setting("", "PEM file of the certificate chain; empty: no TLS", restart=True)
    tls_key: str = setting("", "PEM file of its key", restart=True)
    tls_key_password_file: str = setting(
        "", "file with the password of that key in its first line; empty: it is not encrypted", restart=True
    )
    tls_client_ca: str = setting(
        "", "PEM file of CAs of clients' certificates; empty: none is asked for", restart=True
    )
    tls_client_required: bool = setting(
        True, "with serve.tls_client_ca: refuse TLS clients without a certificate", restart=True
    )
    tls_only: bool = setting(False, "refuse connections without TLS", restart=True)
    acl_file: str = setting(
        "",
        "access rules: plain_acl.yml (ACL 1.0) or users and acls (5.x); read anew when it changes",
        restart=True,
    )
    audit_interval_ms: int = setting(
        60_000, "one log line for each reader of a queue says what it read in such an interval; 0: none",
        minimum=0, restart=True,
    )  # fmt: skip
    frame_bytes_max: int = setting(
        16 * MIB, "bytes of one request", minimum=64 * 1024, maximum=16 * MIB, restart=True
    )
    frame_ms: int = setting(
        30_000, "a request must be complete so long after its first byte", minimum=100, restart=True
    )
    idle_ms: int = setting(
        120_000, "a connection without a byte either way is closed", minimum=1_000, restart=True
    )
    stall_ms: int = setting(
        60_000, "a client that reads nothing of what waits for it is closed", minimum=1_000, restart=True
    )
    unread_bytes_max: int = setting(
        64 * MIB, "answers that clients have not read, all together; above it the oldest are closed",
        minimum=MIB, restart=True,
    )  # fmt: skip
    session_bytes_max: int = setting(
        64 * MIB,
        "groups, members and subscriptions that heartbeats name, in memory; above it new ones are refused",
        minimum=MIB,
        restart=True,
    )
    offsets_bytes_max: int = setting(
        64 * MIB,
        "offsets of groups that commit here, in memory; above it groups and queues that have none yet are refused",
        minimum=MIB,
        restart=True,
    )
    pop_bytes_max: int = setting(
        64 * MIB,
        "what is known of messages that groups popped and did not acknowledge, in memory; above it none is given out",
        minimum=MIB,
        restart=True,
    )
    unfinished_bytes_max: int = setting(
        64 * MIB,
        "requests half received, all together; above it the oldest are closed",
        minimum=MIB,
        restart=True,
    )
    requests_bytes_max: int = setting(
        256 * MIB,
        "requests of 16 KiB and more that are being answered, all together; above it the oldest are closed",
        minimum=32 * MIB,
        restart=True,
    )


@dataclass(frozen=True)
class SlaveSettings:
    """Standing in the routes of the broker as one of its slaves (`tiered run`), for consumers that are sent there.
    Limits, TLS and access rules are those of `[serve]`."""

    broker_id: int = setting(
        0,
        "the id to register under at the name servers, unused and larger than every real slave's; 0: not registered",
        minimum=0,
        maximum=(1 << 31) - 1,
        restart=True,
    )
    advertise: str = setting("", "host:port that clients dial, as routes name it", restart=True)
    bind: str = setting("127.0.0.1:10931", "address to listen on, as host:port", restart=True)
    register_ms: int = setting(
        30_000, "how often to register again; name servers forget a broker after 120 s",
        minimum=1_000, maximum=60_000, restart=True,
    )  # fmt: skip

    def complaints(self) -> list[tuple[str, str]]:
        """Pairs (key, complaint), as ``contradictions`` gives."""
        if self.advertise and self.broker_id == 0:
            return [
                (
                    "slave.broker_id",
                    "0 is the master's id: use one that is free and larger than every slave's",
                )
            ]
        if self.broker_id and not self.advertise:
            return [("slave.advertise", "must be set with slave.broker_id: where do clients dial?")]
        return []


@dataclass(frozen=True)
class PrefetchSettings:
    """How far ahead of sequential readers the archive is read. The window of a reader grows by a batch for every
    window consumed and is halved when blocks expire unread."""

    enabled: bool = setting(True, "read ahead at all")
    window_min_messages: int = setting(
        32, "smallest window; a reader's own batch when that is larger", minimum=1, maximum=1_000_000
    )
    window_first_bytes: int = setting(
        8 * MIB,
        "where the window of a sequential reader begins, before compression: about what one request brings",
        minimum=0,
    )
    window_max_bytes: int = setting(
        32 * MIB, "largest window of one reader, before compression", minimum=64 * KIB, maximum=4 * GIB
    )
    memory_bytes: int = setting(
        96 * MIB,
        "read ahead for all readers together and not consumed yet, before compression",
        minimum=64 * KIB,
    )
    in_hand_bytes: int = setting(
        64 * MIB, "blocks that readers keep from one pull to the next", minimum=64 * KIB
    )
    hold_off_ms: int = setting(
        1_000, "after reading ahead failed, when to try again", minimum=10, maximum=HOUR_MS
    )
    events: int = setting(4096, "events of the read path kept for diagnosis", minimum=16, maximum=1_000_000)


@dataclass(frozen=True)
class FetchSettings:
    """Reading the archive: requests, caches, memory, bandwidth. Unless said otherwise, sizes are of decoded blocks."""

    memory_bytes: int = setting(
        256 * MIB,
        "caches, requests in flight and blocks in readers' hands together never exceed this",
        minimum=8 * MIB,
    )
    cache_bytes: int = setting(128 * MIB, "blocks kept in memory, at most", minimum=0)
    index_cache_bytes: int = setting(32 * MIB, "tails of objects kept in memory, at most", minimum=0)
    query_cache_bytes: int = setting(
        32 * MIB,
        "parts of index files and key sections kept in memory for queries by key and id, at most",
        minimum=0,
        restart=True,
    )
    unread_expiry_ms: int = setting(180_000, "a block fetched ahead is dropped unread after this", minimum=1)
    read_expiry_ms: int = setting(10_000, "a block is dropped this long after its last reader", minimum=0)
    memory_wait_ms: int = setting(
        5_000, "a read that finds no memory waits this long, then fails as temporarily unavailable", minimum=0
    )
    disk_cache_path: str = setting("", "directory of the disk cache; empty: none", restart=True)
    disk_cache_bytes: int = setting(1 * GIB, "bytes of disk that the disk cache takes, at most", minimum=0)
    gap_ratio: float = setting(
        0.125,
        "share of a GET that may be bytes nobody wants, to save requests",
        minimum=0.0,
        maximum=0.9,
    )
    piece_bytes: int = setting(
        4 * MIB, "a longer stored range is fetched in concurrent pieces of about this size", minimum=64 * KIB
    )
    get_max_bytes: int = setting(
        16 * MIB, "stored bytes of one GET, at most; a single larger block goes alone", minimum=64 * KIB
    )
    user_requests: int = setting(16, "requests at once for readers that wait", minimum=1, maximum=1024)
    prefetch_requests: int = setting(8, "requests at once for reading ahead", minimum=1, maximum=1024)
    background_requests: int = setting(2, "requests at once for maintenance", minimum=1, maximum=1024)
    user_bytes_per_s: int = setting(0, "bandwidth of reads somebody waits for; 0: no limit", minimum=0)
    prefetch_bytes_per_s: int = setting(0, "bandwidth of reading ahead; 0: no limit", minimum=0)
    background_bytes_per_s: int = setting(0, "bandwidth of maintenance; 0: no limit", minimum=0)
    bytes_per_s: int = setting(0, "bandwidth of all reads together; 0: no limit", minimum=0)
    queue_max: int = setting(
        4_096, "requests of one kind that may wait; more are refused as temporarily unavailable", minimum=1
    )
    decode_threads: int = setting(
        0, "threads that decode blocks; 0: one a processor (`tiered serve`, asyncio: but one), two at most",
        minimum=0, maximum=64,
    )  # fmt: skip

    @property
    def threads(self) -> int:
        """Threads that a blocking store needs for all requests at once."""
        return self.user_requests + self.prefetch_requests + self.background_requests


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
    index: IndexSettings = field(default_factory=IndexSettings)
    read: ReadSettings = field(default_factory=ReadSettings)
    fetch: FetchSettings = field(default_factory=FetchSettings)
    prefetch: PrefetchSettings = field(default_factory=PrefetchSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    slave: SlaveSettings = field(default_factory=SlaveSettings)


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
    "index": IndexSettings,
    "read": ReadSettings,
    "fetch": FetchSettings,
    "prefetch": PrefetchSettings,
    "serve": ServeSettings,
    "slave": SlaveSettings,
}

NOT_IN_FORCE: dict[str, str] = {
    "retention": "nothing expires yet: messages stay until the archive is deleted",
    "retention.ttl": "nothing expires yet: messages stay until the archive is deleted",
    "compaction": "segments are not merged yet",
    "encryption": "objects are stored unencrypted by this program: use the bucket's own encryption",
    "offload.dictionary": "blocks are compressed without a dictionary",
}
"""Planned names that this version does not obey yet, and what is true instead. Refused, never ignored."""
