"""All settings: one frozen dataclass for each component, one section of the TOML file each.

Fields declared with ``setting`` are for users. Plain fields are constants of the component: users cannot choose a
better value for them, but tests replace them. Sizes are bytes and times milliseconds unless the name says otherwise.
"""

from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from tiered.model.queue import TopicFilter
from tiered.settings.declaration import setting
from tiered.settings.quantities import BadValueError, duration_ms
from tiered.settings.rule_entries import READ_POLICIES, RuleEntry, read_policy_name

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MIN_ARCHIVED_MS = 72 * HOUR_MS
DERIVED = -1
"""Stands for a size that is computed from another setting."""


@dataclass(frozen=True)
class CompactionSettings:
    """Object compaction: `tiered run`, or `tiered compact`, joins small objects to large ones."""

    every_ms: int = setting(
        HOUR_MS,
        "how often `tiered run` looks for objects to join, and for queues whose keys to compact, while it owns the "
        "archive; 0: never",
        minimum=0,
    )
    min_age_ms: int = setting(
        DAY_MS,
        "messages are joined no earlier than this after their upload: if a broker loses the end of its log, it is "
        "mostly the newest part",
        minimum=0,
    )
    memory_bytes: int = setting(
        128 * MIB,
        "memory of a compaction: for messages, the tables that describe them, and reads in progress",
        minimum=16 * MIB,
    )
    spool_bytes: int = 4096 * MIB
    """Disk for objects that are being made, of `tiered run` in its state directory: two rounds of the default memory
    and what they read."""
    bytes_per_s: int = 32 * MIB
    """Bytes a second that `tiered run` reads and sends for compaction: a quarter of it while it uploads or clients
    read, none while it is behind. It joins what a broker with 10 MB/s sends."""
    split_bytes: int = 8 * MIB
    """Messages of a queue above this size get an object of their own."""
    object_bytes: int = 128 * MIB
    """Messages of the largest object that is made."""
    requests_per_s: int = 50
    """Requests that `tiered run` makes for compaction, at most."""


KEYLESS = ("drop", "keep")


@dataclass(frozen=True)
class KeyCompactionSettings:
    """Key compaction: `tiered run`, or `tiered compact-keys`, keeps the latest message of each key of some topics."""

    from_broker: bool = setting(
        True, "compact topics with the attribute cleanup.policy=COMPACTION, unless a rule says otherwise"
    )
    min_age_ms: int = setting(
        3 * DAY_MS,
        "messages are dropped no earlier than this after their upload: consumers that lag less see every message",
        minimum=0,
    )
    keyless: str = setting(
        "drop",
        "what key compaction does with messages without KEYS: drop, as a broker does, or keep",
        choices=KEYLESS,
    )
    memory_bytes: int = 256 * MIB
    """Memory for keys: about ten million of them; more are kept in a file."""


@dataclass(frozen=True)
class GcSettings:
    """Garbage collection."""

    grace_ms: int = setting(
        72 * HOUR_MS,
        "grace period: how long objects that are no longer needed are kept before gc deletes them",
        minimum=0,
    )
    diverged_grace_ms: int = setting(
        30 * 24 * HOUR_MS,
        "grace period of messages that are no longer in the broker's log because it was truncated or replaced",
        minimum=0,
    )
    every_ms: int = setting(
        24 * HOUR_MS,
        "how often `tiered run` expires messages, and deletes objects that are no longer needed if its account may; 0: "
        "it expires messages once a day and deletes no objects",
        minimum=0,
    )
    deletes_per_s: int = 1000
    """Objects that gc deletes in a second, at most: one bulk request."""


@dataclass(frozen=True)
class ScrubSettings:
    """Scrub: `tiered run` reads back what it stored, and stores again what is damaged while the broker has it."""

    every_ms: int = 60_000
    """How often `tiered run` reads new objects back, while it owns the archive."""
    cycle_ms: int = setting(
        30 * 24 * HOUR_MS,
        "time in which `tiered run` reads every object of the archive back once; 0: nothing is read back",
        minimum=0,
    )
    bytes_per_s: int = 16 << 20
    """Bytes a second that `tiered run` reads for it: a quarter of it while it uploads or clients read, none while it
    is behind. In a month it reads 10 TB back."""


@dataclass(frozen=True)
class RetentionSettings:
    """How long messages stay, for topics without a rule in `topics.rules` ([RETENTION.md](RETENTION.md))."""

    ttl: str = setting("forever", "time to live of messages after the broker stored them, such as 12h or 7d")
    from_broker: bool = setting(
        True, "a topic's attribute reserve.time (hours) overrides retention.ttl where it is positive"
    )
    min_archived: str = setting(
        "",
        "messages expire no earlier than this after their upload, whatever the broker's clock was; empty: the smaller "
        "of the time to live and 72h",
    )
    max_share: float = setting(
        0.2,
        "the largest share of the archive's messages that may expire at once; if more would, nothing does until an "
        "operator confirms it (`tiered expire`)",
        minimum=0.0,
        maximum=1.0,
    )

    @property
    def ttl_ms(self) -> int | None:
        """The default time to live; None: forever. Raises BadValueError for a value that was not checked."""
        return duration_ms(self.ttl)

    def min_archived_ms(self, ttl_ms: int | None) -> int:
        """``min_archived`` for a topic with this time to live."""
        if self.min_archived:
            return duration_ms(self.min_archived) or 0
        return MIN_ARCHIVED_MS if ttl_ms is None else min(ttl_ms, MIN_ARCHIVED_MS)

    def complaints(self) -> list[tuple[str, str]]:
        """What is wrong with the two times, as (key of the setting, what to write) pairs; none if both are valid."""
        found = []
        try:
            duration_ms(self.ttl)
        except BadValueError as error:
            found.append(("retention.ttl", str(error)))
        try:
            is_time = not self.min_archived or duration_ms(self.min_archived) is not None
        except BadValueError:
            is_time = False
        if not is_time:
            found.append(("retention.min_archived", 'use a time with its unit, such as "12h" or "3d", or ""'))
        return found


@dataclass(frozen=True)
class TimerSettings:
    """Messages of the gateway topic, which are delivered to another topic at a later time."""

    topic: str = setting(
        "TIERED_TIMERS",
        "the gateway topic, to which producers send messages that are delivered to another topic at a later time; "
        "empty: none",
    )
    max_delay_ms: int = 2 * 365 * 24 * HOUR_MS
    """A timer farther ahead than two years is refused: it is a mistaken unit."""
    ahead_ms: int = setting(
        HOUR_MS,
        "how long before its time a timer is sent to a broker of 5.x, which then delivers it by its own timers; a "
        "broker of 4.9 gets each timer at its time",
        minimum=0,
    )
    refused_ttl_ms: int = setting(
        7 * 24 * HOUR_MS,
        "how long after its time a timer that the broker refuses is sent again, every ten minutes, and for how long "
        "`tiered timers ls --refused` lists messages that are not delivered",
        minimum=HOUR_MS,
    )
    rate_per_s: int = 10_000
    """Timers handed over in a second, at most: a fifth of what a broker takes beside its producers. 0: any number."""

    @property
    def listed_ms(self) -> int:
        """How long a refused timer is listed: until its entry, which is read ``ahead_ms`` before its time, ends."""
        return self.refused_ttl_ms + self.ahead_ms


@dataclass(frozen=True)
class MountSettings:
    """`tiered mount`: retired brokers served under their names. Limits, TLS and access rules are those of `[serve]`,
    name servers those of `[broker]`."""

    node: str = setting(
        "",
        "name of this node among those that share the retired brokers; empty: the host's name",
        restart=True,
    )
    advertise: str = setting(
        "",
        "host name or IP address that clients find in routes and connect to; empty: this machine's",
        restart=True,
    )
    bind: str = setting(
        "127.0.0.1", "IP address to listen on; 0.0.0.0: all addresses of this machine", restart=True
    )
    first_port: int = setting(
        10_940,
        "first of up to 500 consecutive ports, one for each mounted broker; 0: any free ports",
        minimum=0,
        maximum=65_535,
        restart=True,
    )
    ports: int = 500
    """Ports that may be used: more brokers than a node can hold."""


@dataclass(frozen=True)
class BrokerSettings:
    """The broker whose log is archived."""

    store_path: str = setting("", "store directory of the broker (its storePathRootDir)", restart=True)
    conf_path: str = setting(
        "",
        "path of the broker's broker.conf, from which names, paths, disk thresholds and delay levels are read",
    )
    address: str = setting(
        "", "host:port of the broker's remoting port; empty: brokerIP1:listenPort of broker.conf"
    )
    name_servers: tuple[str, ...] = setting(
        (), "name servers as host:port; empty: namesrvAddr of broker.conf", restart=True
    )
    credentials_file: str = setting(
        "",
        "file with accessKey and secretKey for an ACL-enabled broker, in the format of mqadmin's conf/tools.yml; "
        "empty: requests are not signed",
        restart=True,
    )
    request_timeout_ms: int = 3_000
    """Timeout of a request to the broker, which is near: one that needs longer counts as silent."""
    tls: bool = setting(False, "connect to the broker and the name servers with TLS", restart=True)
    tls_ca: str = setting(
        "",
        "PEM file of trusted CA or server certificates; empty: the system's CAs. All TLS files are read again when "
        "they change",
        restart=True,
    )
    tls_verify: str = setting(
        "full",
        "what is verified of the server's certificate. full: chain, validity and host name; ca: chain and validity; "
        "none: nothing, so that man-in-the-middle attacks are possible",
        choices=("full", "ca", "none"),
        restart=True,
    )
    tls_certificate: str = setting("", "PEM file of the client certificate chain", restart=True)
    tls_key: str = setting(
        "", "PEM file of the client key; empty: the key is in tls_certificate", restart=True
    )
    tls_key_password_file: str = setting(
        "",
        "file whose first line is the password of the client key; empty: the key is not encrypted",
        restart=True,
    )

    def complaints(self) -> list[tuple[str, str]]:
        """The TLS settings that are set without another one that they need, as (key, what it requires) pairs: a user
        who sets them expects TLS."""
        requirements = [
            ("tls_key", "broker.tls_certificate"),
            ("tls_key_password_file", "broker.tls_certificate"),
        ]
        if not self.tls:
            names = ("tls_ca", "tls_certificate", "tls_key", "tls_key_password_file")
            requirements = [(name, "broker.tls = true") for name in names]
        elif self.tls_certificate:
            return []
        return [(f"broker.{name}", f"requires {need}") for name, need in requirements if getattr(self, name)]


@dataclass(frozen=True)
class ArchiveSettings:
    """Location and names of the archive."""

    url: str = setting("", "file:///directory or s3://bucket/prefix", restart=True)
    cluster: str = setting("", "cluster name; empty: from broker.conf or the store", restart=True)
    broker: str = setting("", "broker name; empty: from broker.conf or the store", restart=True)
    take_over: bool = setting(
        False,
        "become the archive's writer at the start even if another instance is; that instance then stops writing",
    )
    new_archive: bool = setting(
        False,
        "begin a new archive at archive.url even if this instance already has an archive, there or elsewhere",
    )
    replace_log: bool = setting(
        False,
        "archive from a commitlog that does not continue the archive (another broker's, an older copy, a truncated "
        "log); archived messages that this log lacks are hidden from readers",
    )
    same_broker: bool = setting(
        False,
        "archive from a commitlog that begins above the archive's end although it does not fit (topics were recreated "
        "or the broker's address changed while nothing was archived); archived messages of recreated topics are "
        "hidden from readers, as an earlier generation",
    )


@dataclass(frozen=True)
class TopicSettings:
    """Topics to archive, and rules by topic. Patterns are shell patterns."""

    include: tuple[str, ...] = setting(
        ("*",), "names and patterns of topics to archive; a system topic is archived if its name is here"
    )
    exclude: tuple[str, ...] = setting((), "patterns of topics not to archive; takes precedence over include")
    include_system: bool = setting(False, "also archive RocketMQ's system topics")
    rules: tuple[RuleEntry, ...] = setting(
        (),
        "`[[topics.rules]]` tables with `pattern` and any of `ttl` (12h, 7d, forever), `max_bytes` (stored message "
        "bytes of the topic), `read_policy` and `encryption_key` ([ENCRYPTION.md](ENCRYPTION.md)); the first that "
        "matches a topic applies alone ([RETENTION.md](RETENTION.md))",
    )

    def topic_filter(self, cluster: str, broker: str, trace_topic: str = "") -> TopicFilter:
        """The filter for one broker. ``trace_topic``: see TopicFilter."""
        return TopicFilter(self.include, self.exclude, self.include_system, cluster, broker, trace_topic)


@dataclass(frozen=True)
class OffloadSettings:
    """Uploading: batches, encoding, timeouts, memory."""

    batch_bytes: int = setting(
        32 * MIB,
        "bytes of the commitlog that are uploaded and committed together (a cycle)",
        minimum=64 * KIB,
        maximum=1 * GIB,
    )
    batch_age_ms: int = setting(
        5_000,
        "how long messages wait for others to be uploaded together with (in a cycle); `tiered cost` tells what this "
        "costs in requests",
        minimum=1,
        maximum=HOUR_MS,
    )
    split_bytes: int = setting(
        16 * MIB,
        "if a queue has at least this many bytes of messages in a cycle, they become an object of their own; smaller "
        "ones share an object with those of other queues",
        minimum=64 * KIB,
    )
    block_bytes: int = 512 * KIB
    """Uncompressed size of a block, the unit of reading: a larger one costs each lookup more, a smaller one compresses
    worse."""
    compression_level: int = 1
    """Level of zstd: level 3 takes twice the processor time for a few percent of the bytes."""
    upload_threads: int = setting(4, "number of concurrent uploads", minimum=1, maximum=64)
    attempt_timeout_ms: int = setting(
        30_000,
        "an upload that is not answered within this time is abandoned, and its messages are uploaded again",
        minimum=100,
        maximum=HOUR_MS,
    )
    memory_budget_bytes: int = setting(
        384 * MIB,
        "memory for all buffers of the uploader together; message keys need 8 bytes each in addition where messages "
        "have thousands of them",
        minimum=32 * MIB,
    )
    tables_every_ms: int = 5_000
    """How often the broker's changed tables are archived, group offsets among them. After a restore, messages consumed
    since are delivered again; the broker itself writes its group offsets as often."""
    compress_threads: int = 2
    """Compression threads: enough for a broker's disk, and the broker keeps the other cores."""
    poll_min_ms: int = 1
    """Wait between checks of a growing commitlog."""
    poll_max_ms: int = 100
    """Wait between checks of an idle commitlog."""
    root_every: int = 64
    """Commits between two root pages of the catalog: a reader applies at most this many at its start."""


@dataclass(frozen=True)
class ObjectStoreSettings:
    """Access to the object store. Credentials are not settings: the SDK's credential chain finds them."""

    endpoint_url: str = setting("", "S3 endpoint other than AWS, such as http://127.0.0.1:9000")
    region: str = setting("", "region of the bucket; empty: as the AWS SDK's configuration has it")
    addressing_style: str = setting(
        "auto",
        "whether the bucket's name is in the URL's path or (virtual) in its host name; auto: path if endpoint_url is "
        "set",
        choices=("auto", "path", "virtual"),
    )
    server_side_encryption: str = setting(
        "",
        "encryption header sent for new objects, which some buckets demand; empty: no header, so that the bucket's "
        "default encryption applies",
        choices=("", "AES256", "aws:kms"),
    )
    kms_key: str = setting(
        "", "id or ARN of the KMS key for aws:kms; empty: the bucket's key, else the account's default key"
    )
    key_ring: str = setting(
        "",
        "keys that encrypt new archives before they are stored ([ENCRYPTION.md](ENCRYPTION.md)): `/path/of/keys`, "
        "`aws-kms:KEY` or `command:KEY:/path/of/program`; empty: none",
        restart=True,
    )
    multipart_threshold_bytes: int = 64 * MIB
    """Larger objects are uploaded in parts: a failure costs a part."""
    connect_timeout_ms: int = 5_000
    """Connect timeout: room for two repeated SYNs, after 1 and 3 s."""
    read_timeout_ms: int = 30_000
    """Timeout of a read request, half of the SDK's: the request is then sent again."""
    upload_bytes_per_s: int = setting(0, "limit of the bandwidth of uploads; 0: no limit", minimum=0)
    trusted_network: bool = setting(
        False,
        "send object bodies without a signature over plain HTTP too, which saves CPU on a private network; over HTTPS "
        "they never have one",
    )
    file_readers: str = setting(
        "owner",
        "who may read what is written to a file:// archive, besides root. New files and directories have mode 0600 and "
        "0700 (owner), 0640 and 0750 (group), or 0644 and 0755 (all users of the host)",
        choices=("owner", "group", "all"),
    )
    multipart_part_bytes: int = 16 * MIB
    """A part of a multipart upload; larger where an object would have more than 10,000 parts."""

    def complaints(self) -> list[tuple[str, str]]:
        """What is wrong if an encryption key is set without the encryption that uses it: a (key, what it requires)
        pair, else none."""
        if self.kms_key and self.server_side_encryption != "aws:kms":
            return [("object_store.kms_key", 'requires object_store.server_side_encryption = "aws:kms"')]
        return []

    @property
    def encrypts(self) -> bool:
        """Whether this process encrypts what it stores, also in local files."""
        return bool(self.key_ring)


@dataclass(frozen=True)
class PinSettings:
    """Hard links that keep commitlog files readable until they are archived."""

    enabled: bool = setting(
        True,
        "keep commitlog files that are not archived yet by hard links (pins), which the broker cannot delete",
    )
    directory: str = setting(
        "",
        "directory for these links, one per broker, on the same disk as the commitlog; empty: in the state directory "
        "or beside the store",
    )


@dataclass(frozen=True)
class AdminSettings:
    """The admin HTTP server of `tiered run` and `tiered serve`: a page for browsers ([ADMIN-PAGE.md](ADMIN-PAGE.md)),
    /metrics, /health, /ready, /status.json."""

    host: str = setting("127.0.0.1", "address that the admin server listens on", restart=True)
    port: int = setting(
        10919, "port of the admin server; 0: any free port", minimum=0, maximum=65_535, restart=True
    )
    host_names: tuple[str, ...] = setting(
        (),
        "names of this host that clients may use in URLs of the admin server, besides admin.host, localhost and IP "
        "addresses; others are refused",
        restart=True,
    )
    token_file: str = setting(
        "",
        "file whose first line is the token that users of the admin page enter, of 16 characters or more; empty: on a "
        "loopback address the page needs no token, and on another address it is not served",
        restart=True,
    )


@dataclass(frozen=True)
class ProcessSettings:
    """The process."""

    state_dir: str = setting(
        "",
        "directory for what this process needs on its host: its lock, its identity, links to commitlog files; empty: "
        "$XDG_STATE_HOME/rocketmq-tiered/CLUSTER/BROKER",
        restart=True,
    )
    drain_timeout_ms: int = setting(
        30_000,
        "how long the process may take to finish its uploads after SIGTERM",
        minimum=0,
        maximum=10 * 60_000,
    )
    when_fenced: str = setting(
        "standby",
        "what to do when another process is the archive's writer: wait as a standby, or exit with code 5",
        choices=("standby", "exit"),
    )
    log_level: str = setting("info", "log level", choices=("debug", "info", "warning", "error"))
    standby_retry_ms: int = 30_000
    """Interval at which a standby checks whether it may take over: a tenth of take_over_lag_ms."""
    take_over_lag_ms: int = setting(
        300_000,
        "a standby beside the master becomes the archive's writer after its log has had messages to archive for this "
        "time without any progress of the archive; 0: never",
        minimum=0,
    )


@dataclass(frozen=True)
class IndexSettings:
    """The message index: building and merging of index files."""

    enabled: bool = True
    """Whether index files are built. Without them every query reads all key sections: only tests do that."""
    unindexed_objects_max: int = 64
    """Unindexed segments at which a new index file is built: until then a query reads the key section of each."""
    after_backfill: bool = False
    """Whether a backfill indexes every segment at its end, also those that are too few for a file: only tests do that,
    because a query reads the key sections of so few as fast."""
    memory_bytes: int = 64 * MIB
    """Memory for building and merging index files, in addition to 8 bytes for each key of one object."""
    day_files_max: int = 5
    """Index files of a day that has not ended; one more is merged with those before it."""
    retry_ms: int = 30_000
    """Wait after a failure."""


@dataclass(frozen=True)
class ReadSettings:
    """When clients read from the archive instead of the broker. A reload applies to the next read."""

    policy: str = setting(
        "NOT_IN_DISK",
        "when to read the archive: DISABLE never; NOT_IN_DISK when the message is no longer in the broker's files; "
        "NOT_IN_MEM also when it is not in the page cache; FORCE always (tieredStorageLevel; also 0 to 3)",
        live=True,
    )
    local_threads: int = 4
    """Threads that read the broker's files."""
    local_refresh_ms: int = 1_000
    """Interval at which the broker's directories are checked for new and deleted files."""

    def default_policy(self) -> str:
        """One of READ_POLICIES."""
        return read_policy_name(self.policy) or self.policy

    def complaints(self) -> list[tuple[str, str]]:
        """What is wrong with the policy, as a (key, what to write) pair; none if it is known."""
        known = read_policy_name(self.policy) is not None
        return [] if known else [("read.policy", f"use one of {', '.join(READ_POLICIES)}")]


@dataclass(frozen=True)
class ServeSettings:
    """Serving RocketMQ clients."""

    bind: str = setting(
        "127.0.0.1:9876",
        "address to listen on for clients' requests, as host:port; port 0: any free port",
        restart=True,
    )
    advertise: str = setting(
        "",
        "host:port that clients find in routes and connect to. `tiered run` serves clients only if it is set; for "
        "`tiered serve`, empty: the address in serve.bind, or this machine's if that is 0.0.0.0",
        restart=True,
    )
    refresh_ms: int = 1_000
    """Interval at which new commits of the archive are loaded: one small LIST."""
    pull_messages_max: int = 1_024
    """Messages in a response; a client asks for 32 by default."""
    pull_bytes_max: int = 4 * MIB
    """Bytes in a response; a larger message is sent alone. Clients refuse frames of 16 MiB."""
    memory_bytes: int = setting(
        640 * MIB,
        "memory that clients can make the server hold, in fixed shares: 4/10 requests of 16 KiB and more in progress; "
        "1/10 each: partial requests, unread responses, names in heartbeats, group offsets, popped messages, retry "
        "messages. Above a share the oldest clients are closed (requests, responses) or new entries are refused",
        minimum=160 * MIB,
        restart=True,
    )
    connections_max: int = setting(
        10_000, "largest number of open connections of clients", minimum=1, maximum=1_000_000, restart=True
    )
    connections_per_address_max: int = setting(
        0,
        "largest number of open connections of one client address (of a /64 network for IPv6); 0: a fourth of "
        "serve.connections_max, at least 100. Behind load balancers in serve.proxy_from the clients' own addresses "
        "count",
        maximum=1_000_000,
        restart=True,
    )
    lease_ms: int = 60_000
    """Groups of a server without a heartbeat for this long may be taken over: longer than a pause, shorter than a
    restart by hand."""
    dead_letter_keep_ms: int = 30 * 24 * HOUR_MS
    """Retention of dead letters of the groups served here: time enough to look at them by hand."""
    proxy_from: tuple[str, ...] = setting(
        (),
        "addresses and networks of load balancers whose PROXY protocol headers (v1, v2) name the client; a header from "
        "elsewhere closes the connection",
        restart=True,
    )
    tls_certificate: str = setting(
        "", "PEM file of this server's certificate chain; empty: no TLS", restart=True
    )
    tls_key: str = setting("", "PEM file of this server's private key", restart=True)
    tls_key_password_file: str = setting(
        "",
        "file whose first line is the password of the server key; empty: the key is not encrypted",
        restart=True,
    )
    tls_client_ca: str = setting(
        "", "PEM file of the CAs of client certificates; empty: clients need no certificates", restart=True
    )
    tls_client_required: bool = setting(
        True,
        "refuse clients that have no certificate of a CA in serve.tls_client_ca, if that is set; requires "
        "serve.tls_only",
        restart=True,
    )
    tls_only: bool = setting(False, "refuse connections without TLS", restart=True)
    acl_file: str = setting(
        "",
        "file with the access rules for clients: plain_acl.yml (ACL 1.0), or users and acls (5.x); it is read again "
        "when it changes",
        restart=True,
    )
    audit_interval_ms: int = 60_000
    """Interval of the audit log: one line for each reader of a queue, so that its size follows readers, not reads."""

    def complaints(self) -> list[tuple[str, str]]:
        """What is wrong with the settings for TLS and load balancers, as (key, what it requires) pairs: mostly a
        setting without another one that it needs, so that clients would lack the protection that its user expects."""
        names = ("tls_key", "tls_key_password_file", "tls_client_ca", "tls_only")
        if not self.tls_certificate:
            found = [
                (f"serve.{name}", "requires serve.tls_certificate") for name in names if getattr(self, name)
            ]
        elif self.tls_client_ca and self.tls_client_required and not self.tls_only:
            found = [
                (
                    "serve.tls_only",
                    "serve.tls_client_required has no effect on clients without TLS: set serve.tls_only = true, or "
                    "serve.tls_client_required = false",
                )
            ]
        else:
            found = []
        try:
            self.proxy_networks()
        except ValueError as error:
            found.append(("serve.proxy_from", f"{error}; write addresses or networks, such as 10.0.0.0/24"))
        return found

    def proxy_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of ``proxy_from``. Raises ValueError for a text that is none."""
        return tuple(ip_network(text) for text in self.proxy_from)


@dataclass(frozen=True)
class SlaveSettings:
    """Slave mode of `tiered run`: registers as a slave of the broker and serves consumers that the broker redirects.
    Limits, TLS and access rules are those of `[serve]`."""

    broker_id: int = setting(
        0,
        "broker id under which this process registers as a slave, larger than that of every real slave; 0: slave mode "
        "is off",
        minimum=0,
        maximum=(1 << 31) - 1,
        restart=True,
    )
    advertise: str = setting("", "host:port that clients find in routes and connect to", restart=True)
    bind: str = setting(
        "127.0.0.1:10931",
        "address to listen on for requests of redirected consumers, as host:port",
        restart=True,
    )

    def complaints(self) -> list[tuple[str, str]]:
        """What is wrong if only one of the two settings that slave mode needs is set: a (key, what to do) pair."""
        if self.advertise and self.broker_id == 0:
            return [
                ("slave.broker_id", "0 is the master's: set an unused id, larger than that of every slave")
            ]
        if self.broker_id and not self.advertise:
            return [("slave.advertise", "required by slave.broker_id: clients need an address")]
        return []


@dataclass(frozen=True)
class PrefetchSettings:
    """Prefetching for sequential readers. A reader's window grows by a batch for every window consumed and is halved
    when blocks expire unread."""

    enabled: bool = True
    """Only tests read without."""
    window_max_bytes: int = 32 * MIB
    """Largest window of one reader, uncompressed: 1 GB/s if a request takes 30 ms."""
    memory_bytes: int = 96 * MIB
    """Prefetched and unread blocks of all readers, uncompressed, inside fetch.memory_bytes."""
    window_min_messages: int = 32
    """Smallest window, unless the reader's batch is larger."""
    window_first_bytes: int = 8 * MIB
    """First window of a sequential reader, uncompressed: about the size of one request."""
    buffered_bytes: int = 64 * MIB
    """Blocks that readers keep between pulls."""
    hold_off_ms: int = 1_000
    """Wait after a failed prefetch."""


@dataclass(frozen=True)
class FetchSettings:
    """Reading the archive: requests, caches, memory, bandwidth. Sizes are of decoded blocks unless stated otherwise."""

    memory_bytes: int = setting(
        256 * MIB,
        "memory for reading: caches, requests in progress and blocks for readers together; also the most that decoding "
        "one object of the catalog, of the broker's tables or of consumer groups may take",
        minimum=8 * MIB,
    )
    cache_bytes: int = DERIVED
    """Block cache: half of memory_bytes."""
    index_cache_bytes: int = DERIVED
    """Cache of object tails: an eighth of memory_bytes."""
    query_cache_bytes: int = DERIVED
    """Cache of index files and key sections for queries by key and id: an eighth of memory_bytes."""
    disk_cache_path: str = setting("", "directory of the cache on disk; empty: no such cache", restart=True)
    disk_cache_bytes: int = setting(1 * GIB, "size of the disk cache", minimum=0)
    user_requests: int = 16
    """Concurrent requests of waiting readers: one connection does not fill a network."""
    prefetch_requests: int = 8
    """Concurrent requests of prefetching: waiting readers have twice as many."""
    bytes_per_s: int = setting(0, "limit of the bandwidth of all reads together; 0: no limit", minimum=0)
    background_requests: int = 2
    """Concurrent requests of maintenance."""
    unread_expiry_ms: int = 180_000
    """A prefetched block that is not read is dropped after this."""
    read_expiry_ms: int = 10_000
    """A block is dropped this long after its last read."""
    memory_wait_ms: int = 5_000
    """A read waits this long for memory, then fails as temporarily unavailable."""
    gap_ratio: float = 0.125
    """Share of a GET that may be unneeded bytes, to save requests."""
    piece_bytes: int = 4 * MIB
    """A longer stored range is fetched in concurrent pieces of about this size."""
    get_max_bytes: int = 16 * MIB
    """Stored bytes of one GET; a larger block is fetched alone."""
    queue_max: int = 4_096
    """Waiting requests of one class; more are refused as temporarily unavailable."""
    decode_threads: int = 0
    """Threads that decode blocks; 0: one per processor, at most two (`tiered serve`, asyncio: all but one)."""

    def __post_init__(self) -> None:
        for name, part in (("cache_bytes", 2), ("index_cache_bytes", 8), ("query_cache_bytes", 8)):
            if getattr(self, name) == DERIVED:
                object.__setattr__(self, name, self.memory_bytes // part)

    @property
    def threads(self) -> int:
        """Threads that a blocking store needs for all requests at once."""
        return self.user_requests + self.prefetch_requests + self.background_requests


@dataclass(frozen=True)
class Settings:
    """Settings of all components. Field names are section names."""

    broker: BrokerSettings = field(default_factory=BrokerSettings)
    archive: ArchiveSettings = field(default_factory=ArchiveSettings)
    topics: TopicSettings = field(default_factory=TopicSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    object_store: ObjectStoreSettings = field(default_factory=ObjectStoreSettings)
    pins: PinSettings = field(default_factory=PinSettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    process: ProcessSettings = field(default_factory=ProcessSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    gc: GcSettings = field(default_factory=GcSettings)
    scrub: ScrubSettings = field(default_factory=ScrubSettings)
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    key_compaction: KeyCompactionSettings = field(default_factory=KeyCompactionSettings)
    read: ReadSettings = field(default_factory=ReadSettings)
    fetch: FetchSettings = field(default_factory=FetchSettings)
    prefetch: PrefetchSettings = field(default_factory=PrefetchSettings)
    serve: ServeSettings = field(default_factory=ServeSettings)
    slave: SlaveSettings = field(default_factory=SlaveSettings)
    mount: MountSettings = field(default_factory=MountSettings)
    timers: TimerSettings = field(default_factory=TimerSettings)


SECTIONS: dict[str, type[Any]] = {  # those with settings
    "broker": BrokerSettings,
    "archive": ArchiveSettings,
    "topics": TopicSettings,
    "offload": OffloadSettings,
    "object_store": ObjectStoreSettings,
    "pins": PinSettings,
    "admin": AdminSettings,
    "process": ProcessSettings,
    "retention": RetentionSettings,
    "gc": GcSettings,
    "scrub": ScrubSettings,
    "compaction": CompactionSettings,
    "key_compaction": KeyCompactionSettings,
    "read": ReadSettings,
    "fetch": FetchSettings,
    "serve": ServeSettings,
    "slave": SlaveSettings,
    "mount": MountSettings,
    "timers": TimerSettings,
}

UNSUPPORTED: dict[str, str] = {
    "offload.dictionary": "blocks are compressed without a dictionary",
}
"""Reserved names of planned settings, and what applies instead. They are refused."""
