"""`tiered config check`: check the settings, print each value and its origin."""

from __future__ import annotations

import argparse

from sidecar.cli.arguments import SERVE_FLAGS, add_json, add_places, add_writer_flags, settings_of
from tiered.console import print_json, print_table
from tiered.object_store.open_store import check_addresses
from tiered.settings.load import FIELDS, value_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`check` and the flags of every other verb."""
    parser.add_argument("action", choices=["check"], help="the only action")
    add_places(parser)
    add_writer_flags(parser, SERVE_FLAGS)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print every setting; the loader raises for a wrong one."""
    loaded = settings_of(options)
    archive, endpoint_url = loaded.settings.archive, loaded.settings.object_store.endpoint_url
    check_addresses(archive.url or "file:///", endpoint_url)
    effective = {
        key: {"value": value_of(loaded.settings, key), "from": loaded.origins.get(key, "default")}
        for key in FIELDS
    }
    if options.json:
        print_json(effective)
    else:
        print_table(
            ["setting", "value", "from"], [[k, repr(v["value"]), v["from"]] for k, v in effective.items()]
        )
    return 0
