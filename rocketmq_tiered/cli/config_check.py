"""`tiered config`: check the settings, print each value and its origin, explain the rule of a topic; and print a 5.x
broker's accounts and access rules as a file for serve.acl_file."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocketmq_tiered.cli.arguments import SERVE_FLAGS, add_json, add_places, add_writer_flags, settings_of
from rocketmq_tiered.process.broker_side import address_of, credentials_of, read_conf, tls_of, topic_filter_of
from rocketmq_tiered.process.loaded_archive import archived_topic_table, open_for_reading
from rocketmq_tiered.server.security.rules import read_rules
from tiered.broker_store.conf import find_names
from tiered.broker_store.config import read_topics
from tiered.console import print_json, print_lines, print_table
from tiered.errors import AccessDeniedError, UsageError
from tiered.formats import fastjson
from tiered.object_store.open_store import check_addresses
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.settings.load import FIELDS, LoadedSettings, value_of
from tiered.settings.quantities import FOREVER, written_duration
from tiered.settings.rules_in_force import differences
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRules
from uploader.queue_ttl_classes import FOREVER_CLASS, ttl_class

TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, ``--topic``, and the flags of the verbs whose settings are checked."""
    parser.add_argument(
        "action",
        choices=["check", "acl-from-broker"],
        help="check: check and print the settings; acl-from-broker: print the accounts (with passwords) and access "
        "rules of a 5.x broker, as a file for serve.acl_file",
    )
    parser.add_argument(
        "--topic",
        metavar="TOPIC",
        help="print only what applies to this topic, each value with the rule or setting it is from",
    )
    add_places(parser)
    add_writer_flags(parser, SERVE_FLAGS)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Check the settings, and print them: all, or with ``--topic`` those that apply to it; or print the accounts of the
    broker. Raises UsageError for an unknown or impossible setting."""
    loaded = settings_of(options)
    archive, endpoint_url = loaded.settings.archive, loaded.settings.object_store.endpoint_url
    check_addresses(archive.url or "file:///", endpoint_url)
    if options.action == "acl-from-broker":
        print_json(_broker_rules(loaded.settings))
        return 0
    if options.topic is not None:
        _explain(options.topic, loaded, as_json=options.json)
        return 0
    effective = {
        key: {"value": _plain(value_of(loaded.settings, key)), "from": loaded.origins.get(key, "default")}
        for key in FIELDS
    }
    acl_file = loaded.settings.serve.acl_file
    rules = read_rules(Path(acl_file)).explained() if acl_file else []
    if options.json:
        print_json({**effective, "serve.acl_file": {**effective["serve.acl_file"], "rules": rules}})
    else:
        print_table(
            ["setting", "value", "from"], [[k, repr(v["value"]), v["from"]] for k, v in effective.items()]
        )
        if rules:
            print_table([f"account of {acl_file}", "rule"], [list(rule) for rule in rules])
    return 0


def _broker_rules(settings: Settings) -> dict[str, Any]:
    """The users and access rules of the broker, as it replies to AUTH_LIST_USER and AUTH_LIST_ACL. Raises TieredError
    if it cannot be reached or refuses."""
    if not (address := address_of(settings, read_conf(settings))):
        raise UsageError(
            "the broker's address is unknown: neither broker.address nor broker.conf says it",
            hint="give --broker-address HOST:PORT",
        )
    client = BrokerClient(address, TIMEOUT_S, credentials_of(settings), tls_of(settings))
    try:
        return {
            "users": _listed(client, RequestCode.AUTH_LIST_USER),
            "acls": _listed(client, RequestCode.AUTH_LIST_ACL),
        }
    finally:
        client.close()


def _listed(client: BrokerClient, code: RequestCode) -> Any:
    """The list that the broker returns to the request ``code``. Raises AccessDeniedError if it refuses."""
    answer = client.call(code)
    if answer.code != ResponseCode.SUCCESS:
        raise AccessDeniedError(
            f"the broker refuses to list its accounts or access rules ({code.name}): {answer.remark or answer.code}",
            hint="set broker.credentials_file to an administrator's account; of a 4.9 broker, copy conf/plain_acl.yml",
        )
    return fastjson.loads(answer.body or b"[]")


def _plain(value: Any) -> Any:
    """``value``, with rules of topics as in the settings file."""
    return (
        [_plain(one) for one in value]
        if isinstance(value, tuple)
        else getattr(value, "to_json", lambda: value)()
    )


def _explain(topic: str, loaded: LoadedSettings, *, as_json: bool) -> None:
    """Print what applies to ``topic``: each value, and whether an attribute of the topic, an entry of topics.rules or a
    setting gives it; then which of these settings differ from the rules that the archive's writer committed."""
    settings = loaded.settings
    table, table_place, refusal, differing = _topic_table(topic, loaded)
    rule = TopicRules.of(settings).of_topic(topic, table)
    class_days = ttl_class(rule.ttl_ms)  # objects hold messages of topics with about the same time to live
    setting_origins = {
        key: f"{key} ({loaded.origins.get(key, 'default')})"
        for key in ("retention.ttl", "retention.min_archived", "read.policy")
    }
    values = {
        "archived": ("no" if refusal else "yes", refusal or "topics.include"),
        "ttl": (rule.ttl, setting_origins.get(rule.ttl_from, rule.ttl_from)),
        "minArchived": (written_duration(rule.min_archived_ms), setting_origins["retention.min_archived"]),
        "maxBytes": (rule.max_bytes, rule.max_bytes_from),
        "readPolicy": (rule.read_policy, setting_origins.get(rule.read_policy_from, rule.read_policy_from)),
        "ttlClass": (FOREVER if class_days == FOREVER_CLASS else f"{class_days}d", "the time to live"),
    }
    if as_json:
        documents = {name: {"value": value, "from": origin} for name, (value, origin) in values.items()}
        print_json({"topic": topic, "topicTable": table_place, "differsFromArchive": differing, **documents})
        return
    print_table(
        [topic, "value", "from"],
        [[name, "none" if value is None else str(value), origin] for name, (value, origin) in values.items()],
    )
    print_lines(*(f"not in force: {difference}" for difference in differing))
    print_lines(f"topic attributes: {table_place or 'not read, because neither --store nor --url is given'}")


def _topic_table(topic: str, loaded: LoadedSettings) -> tuple[Mapping[str, Any], str | None, str, list[str]]:
    """Returns the broker's topic table, where it was read (the broker's store, else the archive, else None), why
    ``topic`` is not archived ("" if it is), and which settings differ from the rules that the archive's writer
    committed. Without store and archive, a system topic that is named after the broker is not recognised."""
    settings, differing = loaded.settings, list[str]()
    store_path, url, conf = settings.broker.store_path, settings.archive.url, read_conf(settings)
    cluster, broker = settings.archive.cluster, settings.archive.broker
    table: Mapping[str, Any] = {}
    place = None
    if store_path:
        table, place = read_topics(Path(store_path)), store_path
        names = find_names(conf, table)
        cluster, broker = cluster or names.cluster, broker or names.broker
    elif url:
        with open_for_reading(url, settings) as archive:
            cluster, broker = archive.cluster, archive.broker
            table, place = archived_topic_table(archive.store, archive.state), archive.title
            differing = differences(loaded, archive.state.settings)
    return table, place, topic_filter_of(settings, conf, cluster, broker).refusal(topic), differing
