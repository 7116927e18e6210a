"""Arguments shared by verbs, most of which set a setting, and the two forms of a result."""

from __future__ import annotations

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
    SettingFlag("--cluster", "archive.cluster", "cluster name (default: the only one)"),
    SettingFlag("--broker", "archive.broker", "broker name (default: the only one)"),
)
STORE_FLAGS = (
    SettingFlag("--endpoint-url", "object_store.endpoint_url", "S3 endpoint of a store other than AWS"),
    SettingFlag("--region", "object_store.region", "S3 region"),
)
BROKER_FLAGS = (
    SettingFlag("--broker-conf", "broker.conf_path", "the broker's broker.conf"),
    SettingFlag("--broker-address", "broker.address", "host:port of the broker's remoting port"),
)
TOPIC_FLAGS = (
    SettingFlag("--include", "topics.include", "pattern of topics to archive, comma-separated"),
    SettingFlag("--exclude", "topics.exclude", "pattern of topics not to archive, comma-separated"),
)
SERVE_FLAGS = (
    SettingFlag("--bind", "serve.bind", "host:port to listen on (default 127.0.0.1:9876)"),
    SettingFlag(
        "--advertise",
        "serve.advertise",
        "host:port that clients connect to (default: the bound address, or this host's)",
    ),
)
MOUNT_FLAGS = (
    SettingFlag("--name-servers", "broker.name_servers", "name servers as host:port, comma-separated"),
    SettingFlag("--node", "mount.node", "name of this node (default: the host's)"),
    SettingFlag("--advertise", "mount.advertise", "host that clients connect to (default: this machine's)"),
)
_FLAGS = (*NAME_FLAGS, *STORE_FLAGS, *BROKER_FLAGS, *TOPIC_FLAGS, *SERVE_FLAGS, *MOUNT_FLAGS)
_KNOWN = {flag.key: flag.option for flag in _FLAGS} | {
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


def instant(text: str) -> int:
    """Milliseconds since the epoch. Raises ArgumentTypeError, which argparse reports as wrong usage."""
    try:
        return parse_instant(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def add_setting_flags(parser: argparse.ArgumentParser, *groups: tuple[SettingFlag, ...]) -> None:
    """``--config``, ``--set`` and the named flags of ``groups``."""
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
    """The named flags of ``groups``."""
    for flag in (flag for group in groups for flag in group):
        parser.add_argument(flag.option, dest=flag.key, metavar="VALUE", default=None, help=flag.meaning)


def add_archive(parser: argparse.ArgumentParser, *groups: tuple[SettingFlag, ...]) -> None:
    """ARCHIVE_URL, the flags that choose an archive in it, and those of ``groups``."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, *groups)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Store, archive and state directory of `tiered run`."""
    add_store(parser)
    parser.add_argument(
        "--url", dest="archive.url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix"
    )
    add_state_dir(parser)


def add_store(parser: argparse.ArgumentParser) -> None:
    """``--store``."""
    parser.add_argument(
        "--store", dest="broker.store_path", metavar="DIRECTORY", help="the broker's store directory"
    )


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    """``--state-dir``."""
    parser.add_argument(
        "--state-dir",
        dest="process.state_dir",
        metavar="DIRECTORY",
        help="state directory of tiered run: its lock, identity and admin address",
    )


def add_writer_flags(parser: argparse.ArgumentParser, *groups: tuple[SettingFlag, ...]) -> None:
    """Flags of verbs that write an archive, and those of ``groups``."""
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, BROKER_FLAGS, *groups)
    add_topics(parser)
    become = "become the archive's writer even if another instance is, which is then fenced"
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
        help="use topics.rules and [retention] of this settings file instead of the rules in force in the archive",
    )


def add_topic(parser: argparse.ArgumentParser) -> None:
    """``--topic``, with patterns."""
    parser.add_argument(
        "--topic", metavar="PATTERNS", default="", help="topics, comma-separated (default: all)"
    )


def add_times(parser: argparse.ArgumentParser, *, since: str = "no limit", until: str = "no limit") -> None:
    """Adds ``--since`` and ``--until``. ``since`` and ``until``: how the help describes their defaults."""
    how = "ISO 8601, by default in UTC, ms since 1970, or -1h"
    parser.add_argument(
        "--since", type=instant, metavar="TIME", help=f"from this time on: {how} (default: {since})"
    )
    parser.add_argument("--until", type=instant, metavar="TIME", help=f"before this time (default: {until})")


def add_version(parser: argparse.ArgumentParser) -> None:
    """``--at-version``."""
    parser.add_argument(
        "--at-version",
        type=whole_number,
        metavar="N",
        help="as the archive was at catalog version N, until gc deletes it",
    )


def add_generation(parser: argparse.ArgumentParser) -> None:
    """``--generation``."""
    parser.add_argument(
        "--generation", type=int, metavar="N", help="an earlier generation of a recreated topic"
    )


def add_prices(parser: argparse.ArgumentParser) -> None:
    """``--prices``."""
    parser.add_argument(
        "--prices", metavar="FILE", help="TOML file of prices (default: S3 Standard, us-east-1)"
    )


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def add_rewriting(parser: argparse.ArgumentParser, section: str, verb: str, *, also: str = "") -> None:
    """``--older-than``, a setting of ``section``, and ``--spool``; ``also``: what else that directory is for."""
    parser.add_argument(
        "--older-than",
        dest=f"{section}.min_age_ms",
        metavar="DURATION",
        help=f"{verb} only what was committed at least this long ago, such as 72h",
    )
    parser.add_argument(
        "--spool",
        metavar="DIRECTORY",
        default=os.environ.get("TMPDIR") or tempfile.gettempdir(),
        help=f"directory for objects in progress, up to 4 GiB{also} (default: the temporary directory)",
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
    """The same for a process that reads them again: it logs as before."""
    flags: dict[str, tuple[str, Any]] = flag_assignments(options.assignments)
    for key, value in vars(options).items():
        if "." in key and value is not None:
            flags[key] = (_KNOWN[key], value)
    loaded = load_settings(options.config, environment=os.environ, flags=flags)
    limit_decoding(loaded.settings.fetch.memory_bytes)
    return loaded


def print_result(options: argparse.Namespace, document: Any, lines: Iterable[str]) -> None:
    """``document`` with ``--json``, else ``lines``."""
    if options.json:
        print_json(document)
    else:
        print_lines(*lines)
