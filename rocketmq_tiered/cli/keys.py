"""`tiered keys`: the keys of an encrypted archive: check them, make new ones, wrap them by another key of the ring."""

import argparse
from contextlib import closing
from typing import Any

from rocketmq_tiered.cli.arguments import add_archive, add_json, print_result, settings_of
from tiered.catalog.archives import find_archive
from tiered.console import time_text
from tiered.errors import EncryptionKeyError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.archive_keys import ArchiveKey, ArchiveKeys
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store

ACTIONS = ("check", "rotate", "rewrap")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, ARCHIVE_URL and what rotating and rewrapping need."""
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="check: which keys can be used here; rotate: a new key for new objects; rewrap: wrap keys by another ring "
        "key, and change no object",
    )
    add_archive(parser)
    parser.add_argument(
        "--from",
        dest="sources",
        metavar="ID",
        action="append",
        default=[],
        help="rewrap: wrap again what this ring key wraps; may be repeated (default: all ring keys but the current one "
        "and those of topics)",
    )
    parser.add_argument(
        "--to",
        metavar="ID",
        default="",
        help="rewrap: ring key that wraps from now on (default: the current one)",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the keys of the archive. Exit code 2 if one of them cannot be used here."""
    settings = settings_of(options).settings
    with closing(open_store(options.url, StoreOptions(settings.object_store))) as root:
        archive = find_archive(root, settings.archive.cluster or None, settings.archive.broker or None)
        keys = root.keys(archive_prefix(archive.cluster, archive.broker))
        if not keys.is_encrypted():
            raise UsageError(
                f"the archive {archive.store.url} is not encrypted",
                hint="only a new archive can be encrypted: set object_store.key_ring before it begins",
            )
        if options.action == "rotate":
            keys.add(keys.ring.current)
        elif options.action == "rewrap":
            target = options.to or keys.ring.current
            # By default the keys of topics keep their ring keys, which the rules of these topics name.
            general = {one.ring_key for one in keys.table().keys if not one.is_topics}
            keys.rewrap(set(options.sources) or general - {target}, target)
        document = [_described(keys, one) for one in keys.table(is_new=True).keys]
    lines = [
        f"{one['id']}  {'topics with keys of their own' if one['ofTopics'] else 'all other objects'}, made "
        f"{time_text(one['createdMs'])}: wrapped by {one['ringKey']}; {one['problem'] or 'can be used'}"
        for one in document
    ]
    print_result(options, {"keys": document}, lines)
    return EncryptionKeyError.exit_code if any(one["problem"] for one in document) else 0


def _described(keys: ArchiveKeys, one: ArchiveKey) -> dict[str, Any]:
    """The fields of a key, and why it cannot be used, if so."""
    problem = ""
    try:
        keys.to_read(one.key_id)
    except EncryptionKeyError as error:
        problem = error.message
    return {
        "id": one.key_id,
        "ringKey": one.ring_key,
        "ofTopics": one.is_topics,
        "createdMs": one.created_ms,
        "problem": problem,
    }
