"""Arguments shared by verbs, most of which set a setting, and the two forms of a result."""

import argparse
import os
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

from rocketmq_tiered.process.logs import log_plain
from tiered.console import print_json, print_lines
from tiered.errors import UsageError
from tiered.formats.memory_bound import limit_decoding
from tiered.settings.load import LoadedSettings, flag_assignments, load_settings
from tiered.timestamps import parse_instant


class SettingFlag(NamedTuple):
    """A flag that sets one setting."""

    option: str
    key: str
    meaning: str


NAME_FLAGS = (
    SettingFlag(
        "--cluster",
        "archive.cluster",
        "name of the cluster (default: read from the broker's store, or the only one)",
    ),
    SettingFlag(
        "--broker",
        "archive.broker",
        "name of the broker (default: read from the broker's store, or the only one)",
    ),
)
STORE_FLAGS = (
    SettingFlag(
        "--endpoint-url", "object_store.endpoint_url", "URL of the S3 endpoint, for a store other than AWS"
    ),
    SettingFlag("--region", "object_store.region", "S3 region"),
)
BROKER_FLAGS = (
    SettingFlag("--broker-conf", "broker.conf_path", "path of the broker's configuration file, broker.conf"),
    SettingFlag("--broker-address", "broker.address", "host:port at which the broker listens for clients"),
)
TOPIC_FLAGS = (
    SettingFlag("--include", "topics.include", "patterns of the topics to archive, comma-separated"),
    SettingFlag("--exclude", "topics.exclude", "patterns of topics that are not archived, comma-separated"),
)
SERVE_FLAGS = (
    SettingFlag("--bind", "serve.bind", "host:port to listen on (default 127.0.0.1:9876)"),
    SettingFlag(
        "--advertise",
        "serve.advertise",
        "host:port that clients connect to (default: the address of --bind, or this host's where that is 0.0.0.0)",
    ),
)
MOUNT_FLAGS = (
    SettingFlag("--name-servers", "broker.name_servers", "the name servers as host:port, comma-separated"),
    SettingFlag(
        "--node", "mount.node", "name of this node among those that mount (default: the host's name)"
    ),
    SettingFlag(
        "--advertise", "mount.advertise", "host that clients connect to (default: this machine's address)"
    ),
)
_FLAGS = (*NAME_FLAGS, *STORE_FLAGS, *BROKER_FLAGS, *TOPIC_FLAGS, *SERVE_FLAGS, *MOUNT_FLAGS)
_OPTIONS = {flag.key: flag.option for flag in _FLAGS} | {
    "topics.include_system": "--include-system",
    "archive.take_over": "--take-over",
    "archive.replace_log": "--replace-log",
    "archive.same_broker": "--same-broker",
    "archive.new_archive": "--new-archive",
    "archive.url": "ARCHIVE_URL",
    "broker.store_path": "STORE",
    "process.state_dir": "--state-dir",
    "gc.grace_ms": "--grace",
    "compaction.min_age_ms": "--older-than",
    "key_compaction.min_age_ms": "--older-than",
}
"""Key of a setting -> the option that sets it, for messages. The option's ``dest`` is the key."""


def instant(text: str) -> int:
    """Milliseconds since the epoch. Raises ArgumentTypeError, which argparse reports as wrong usage."""
    try:
        return parse_instant(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def add_setting_flags(parser: argparse.ArgumentParser, *groups: tuple[SettingFlag, ...]) -> None:
    """Add ``--config``, ``--set`` and the flags of ``groups``, each of which sets one setting."""
    parser.add_argument("--config", metavar="FILE", help="TOML settings file (default: $TIERED_CONFIG)")
    parser.add_argument(
        "--set",
        dest="assignments",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="set any setting (docs/SETTINGS.md); may be repeated",
    )
    add_flags(parser, *groups)


def add_flags(parser: argparse.ArgumentParser, *groups: tuple[SettingFlag, ...]) -> None:
    """Add the flags of ``groups``, each of which sets one setting."""
    for flag in (flag for group in groups for flag in group):
        parser.add_argument(flag.option, dest=flag.key, metavar="VALUE", default=None, help=flag.meaning)


def add_archive(parser: argparse.ArgumentParser, *groups: tuple[SettingFlag, ...]) -> None:
    """Add ARCHIVE_URL, the flags that choose one of the archives below it, and the flags of ``groups``."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, *groups)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add ``--store``, ``--url`` and ``--state-dir``: what `tiered run` reads, where it archives, its own files."""
    add_store(parser)
    parser.add_argument(
        "--url", dest="archive.url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix"
    )
    add_state_dir(parser)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add ``--store``, the broker's store directory, which sets broker.store_path."""
    parser.add_argument(
        "--store",
        dest="broker.store_path",
        metavar="DIRECTORY",
        help="the broker's store directory (storePathRootDir)",
    )


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--state-dir``, the directory of `tiered run`, which sets process.state_dir."""
    parser.add_argument(
        "--state-dir",
        dest="process.state_dir",
        metavar="DIRECTORY",
        help="directory where tiered run keeps its lock, its identity and its admin address",
    )


def add_writer_flags(parser: argparse.ArgumentParser, *groups: tuple[SettingFlag, ...]) -> None:
    """Flags of verbs that write an archive, and those of ``groups``."""
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, BROKER_FLAGS, *groups)
    add_topics(parser)
    become = "become the archive's writer even if another instance is: that one may no longer write"
    add_switch(parser, "--take-over", "archive.take_over", become)


def add_switch(parser: argparse.ArgumentParser, option: str, key: str, meaning: str) -> None:
    """An option without a value, which sets the setting ``key`` to true."""
    parser.add_argument(option, dest=key, action="store_const", const="true", default=None, help=meaning)


def add_topics(parser: argparse.ArgumentParser) -> None:
    """Flags that select the topics to archive."""
    add_flags(parser, TOPIC_FLAGS)
    add_switch(parser, "--include-system", "topics.include_system", "also archive RocketMQ's system topics")


def add_rules(parser: argparse.ArgumentParser) -> None:
    """``--rules``."""
    parser.add_argument(
        "--rules",
        metavar="FILE",
        help="use topics.rules and [retention] of this settings file instead of the rules recorded in the archive",
    )


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Add ``--topic``, which takes names and patterns of topics."""
    parser.add_argument(
        "--topic",
        metavar="PATTERNS",
        default="",
        help="names or patterns of topics, comma-separated (default: all)",
    )


def add_times(parser: argparse.ArgumentParser, *, since: str = "no limit", until: str = "no limit") -> None:
    """Add ``--since`` and ``--until``. ``since`` and ``until`` describe their defaults in the help."""
    how = "ISO 8601 (UTC without an offset), milliseconds since 1970, or an age such as -1h"
    parser.add_argument(
        "--since", type=instant, metavar="TIME", help=f"only from this time on: {how} (default: {since})"
    )
    parser.add_argument(
        "--until", type=instant, metavar="TIME", help=f"only before this time (default: {until})"
    )


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--at-version``, which reads an earlier version of the catalog."""
    parser.add_argument(
        "--at-version",
        type=whole_number,
        metavar="N",
        help="read the archive as it was at catalog version N, if tiered gc has not deleted that since",
    )


def add_generation(parser: argparse.ArgumentParser) -> None:
    """Add ``--generation``: which one is meant of a topic that was deleted and created again."""
    parser.add_argument(
        "--generation",
        type=int,
        metavar="N",
        help="generation N of a topic that was deleted and created again (default: the newest)",
    )


def add_prices(parser: argparse.ArgumentParser) -> None:
    """``--prices``."""
    parser.add_argument(
        "--prices", metavar="FILE", help="TOML file with prices (default: those of S3 Standard in us-east-1)"
    )


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def add_rewriting(parser: argparse.ArgumentParser, section: str, verb: str, *, also: str = "") -> None:
    """Add ``--older-than``, which sets ``min_age_ms`` of the settings' ``section``, and ``--spool``. ``verb`` says in
    the help what the command does with old messages, ``also`` what else the spool directory is for."""
    parser.add_argument(
        "--older-than",
        dest=f"{section}.min_age_ms",
        metavar="DURATION",
        help=f"{verb} only what was archived at least this long ago, such as 72h",
    )
    parser.add_argument(
        "--spool",
        metavar="DIRECTORY",
        default=os.environ.get("TMPDIR") or tempfile.gettempdir(),
        help=f"directory for objects while they are made, up to 4 GiB{also} (default: the temporary directory)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def settings_of(options: argparse.Namespace) -> LoadedSettings:
    """The settings of this command line, with environment and file. From now on, plain lines are logged."""
    loaded = loaded_settings(options)
    log_plain(loaded.settings.process.log_level)
    return loaded


def loaded_settings(options: argparse.Namespace) -> LoadedSettings:
    """The settings of this command line, with environment and file. Logging stays as it is, as `tiered run` reads its
    settings again while it runs."""
    flags: dict[str, tuple[str, Any]] = flag_assignments(options.assignments)
    for key, value in vars(options).items():
        if "." in key and value is not None:
            flags[key] = (_OPTIONS[key], value)
    loaded = load_settings(options.config, environment=os.environ, flags=flags)
    limit_decoding(loaded.settings.fetch.memory_bytes)
    return loaded


def print_result(options: argparse.Namespace, document: Any, lines: Iterable[str]) -> None:
    """``document`` with ``--json``, else ``lines``."""
    if options.json:
        print_json(document)
    else:
        print_lines(*lines)
