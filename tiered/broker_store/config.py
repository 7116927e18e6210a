"""Reads the broker's state: topic table, subscription groups, consumer offsets, delay offsets, static topics.

It is in ``config/*.json`` (fastjson's dialect; if a file is missing, empty or broken, its ``.bak`` is read) or in
RocksDB directories. With LMQs enabled, ``lmqConsumerOffset.json`` replaces ``consumerOffset.json``. Does not interpret
topic attributes.

Sources: org.apache.rocketmq.common.ConfigManager, org.apache.rocketmq.broker.config.v1.RocksDBConfigManager,
LmqConsumerOffsetManager.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tiered.consume_queue.rocksdb_copy import RocksdbCopy, is_rocksdb
from tiered.errors import CorruptionError, StoreLayoutError
from tiered.formats.fastjson import FastjsonError, loads
from tiered.residency import open_failure

TOPICS: Final = "topics"
SUBSCRIPTION_GROUPS: Final = "subscriptionGroups"
CONSUMER_OFFSETS: Final = "consumerOffsets"
_JSON_FILES: Final = (
    "topics.json",
    "subscriptionGroup.json",
    "consumerOffset.json",
    "lmqConsumerOffset.json",
    "delayOffset.json",
    "topicQueueMapping.json",
)
_UNIFIED: Final = "metadata"
"""The directory of the one RocksDB that has a family for each table (5.5, useSingleRocksDBForAllConfigs). The earlier
databases of single tables stay there, and are no longer written."""
_FAMILIES: Final = {
    TOPICS: "topic",
    SUBSCRIPTION_GROUPS: "subscriptionGroup",
    CONSUMER_OFFSETS: "consumerOffset",
}
Document = dict[str, Any]


@dataclass(frozen=True)
class BrokerState:
    """The broker's state other than messages.

    ``topics`` and ``subscription_groups`` map a name to its configuration as the broker stores it;
    ``consumer_offsets`` maps "topic@group" to the next offset per queue id (0 for an LMQ); ``delay_offsets`` maps a
    delay level to its progress; ``topic_queue_mappings`` maps a static topic to the brokers of its logical queues, as
    the broker stores it; ``source`` maps each of these to its file. ``damaged`` maps the field of each table that could
    not be read to the reason: the field is empty, and says nothing about the broker.
    """

    topics: Mapping[str, Document] = field(default_factory=dict)
    subscription_groups: Mapping[str, Document] = field(default_factory=dict)
    consumer_offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    delay_offsets: Mapping[int, int] = field(default_factory=dict)
    topic_queue_mappings: Mapping[str, Document] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)


def read_broker_state(store_path: Path, *, is_broker_dead: bool = False) -> BrokerState:
    """Read the broker's tables (topics, groups, offsets) from its files. A table without a file is empty, as at a fresh
    broker; one whose file and ``.bak`` are both broken is named in ``damaged`` of the result. ``is_broker_dead``:
    RocksDB files may be linked instead of copied, as no broker changes them.

    Raises AccessDeniedError or UnavailableError for a file that cannot be read.
    """
    config = store_path / "config"
    source: dict[str, str] = {}
    readers: dict[str, Callable[[Path, bool, dict[str, str]], Any]] = {
        "topics": _topics,
        "subscription_groups": _subscription_groups,
        "consumer_offsets": _consumer_offsets,
        "delay_offsets": _delay_offsets,
        "topic_queue_mappings": _topic_queue_mappings,
    }
    tables, damaged = {}, {}
    for name, read in readers.items():
        try:
            tables[name] = read(config, is_broker_dead, source)
        except CorruptionError as error:
            damaged[name] = error.message
    return BrokerState(**tables, source={k: v for k, v in source.items() if v}, damaged=damaged)


def read_topics(store_path: Path, *, is_broker_dead: bool = False) -> dict[str, Document]:
    """The topic table alone, read as ``read_broker_state`` does. Raises CorruptionError if it and its ``.bak`` are
    broken, and what that raises."""
    return _topics(store_path / "config", is_broker_dead, {})


def is_batch_topic(topic: Document | None) -> bool:
    """Whether a row of the topic table says queue.type=BatchCQ."""
    attributes = (topic or {}).get("attributes")
    return isinstance(attributes, dict) and attributes.get("queue.type") == "BatchCQ"


def topics_fingerprint(store_path: Path) -> tuple[tuple[str, int, int], ...]:
    """The part of ``state_fingerprint`` that changes with the topic table."""
    return tuple(
        row
        for row in state_fingerprint(store_path)
        if row[0].endswith("/topics.json") or Path(row[0]).parent.name in (TOPICS, _UNIFIED)
    )


def topic_names_backup(store_path: Path) -> frozenset[str]:
    """The topics in the ``.bak`` file of the topic table: one that is there and not in the table may not be deleted, as
    the table may be incomplete. Empty without such a file, and if the table is in RocksDB."""
    config = store_path / "config"
    if _rocksdb_of(config, TOPICS, "topics.json") is not None:
        return frozenset()  # a file from before the table moved to RocksDB tells nothing
    path = config / "topics.json.bak"
    document, _ = _read_one(path) or ({}, path)
    return frozenset(_as_map(document.get("topicConfigTable"), path))


def state_fingerprint(store_path: Path) -> tuple[tuple[str, int, int], ...]:
    """(path, size in bytes, time of the last change in ns) of each file with a table of the broker: another result than
    before shows that the broker has written one."""
    config = store_path / "config"
    paths = [config / name for name in _JSON_FILES]
    for name in (*_FAMILIES, _UNIFIED):
        if is_rocksdb(config / name):
            with contextlib.suppress(OSError):  # reading it reports the error
                paths += sorted((config / name).iterdir())
    states = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        states.append((str(path), status.st_size, status.st_mtime_ns))
    return tuple(states)


def refuse_unknown_configuration(store_path: Path) -> None:
    """Raise StoreLayoutError if the broker keeps its tables in RocksDB of version 2 (configManagerVersion), which is
    not supported."""
    config = store_path / "config"
    if is_rocksdb(config / "rdb"):
        # Version 2 neither imports nor removes version 1: the one written last counts.
        others = [_mtime_ns(config / "topics.json")]
        others += [_last_change_ns(config / name) for name in (TOPICS, _UNIFIED) if is_rocksdb(config / name)]
        if _last_change_ns(config / "rdb") < max(others):
            return
        raise StoreLayoutError(
            f"{config / 'rdb'} holds the broker's tables in RocksDB of version 2, which is not supported",
            hint="set configManagerVersion=v1 in broker.conf and restart the broker",
        )


def _topics(config: Path, is_broker_dead: bool, source: dict[str, str]) -> dict[str, Document]:
    """The topic table in the directory ``config``."""
    return _table(config, TOPICS, "topics.json", "topicConfigTable", is_broker_dead, source)


def _subscription_groups(config: Path, is_broker_dead: bool, source: dict[str, str]) -> dict[str, Document]:
    file, key = "subscriptionGroup.json", "subscriptionGroupTable"
    return _table(config, SUBSCRIPTION_GROUPS, file, key, is_broker_dead, source)


def _delay_offsets(config: Path, _: bool, source: dict[str, str]) -> dict[int, int]:
    document, path = _read_json(config / "delayOffset.json")
    source["delayOffsets"] = str(path or "")
    return _int_map(document.get("offsetTable"), path or config)


def _topic_queue_mappings(config: Path, _: bool, source: dict[str, str]) -> dict[str, Document]:
    """The queue mappings of static topics. Brokers with tables in RocksDB keep them in this file as well."""
    document, path = _read_json(config / "topicQueueMapping.json")
    source["topicQueueMappings"] = str(path or "")
    table = _as_map(document.get("topicQueueMappingInfoMap"), path or config)
    return {name: _as_map(value, path or config) for name, value in table.items()}


def _table(
    config: Path, database: str, file: str, key: str, is_broker_dead: bool, source: dict[str, str]
) -> dict[str, Document]:
    """A table of the broker: from RocksDB (``database``: its directory) if that was written last, else from the JSON
    ``file``, where it is the member ``key``. Its path is put into ``source``. ``is_broker_dead`` as for
    read_broker_state."""
    place = _rocksdb_of(config, database, file)
    if place is not None:
        directory, family = place
        source[database] = str(directory)
        return {
            name: _as_map(value, directory) for name, value in _entries(directory, family, is_broker_dead)
        }
    document, path = _read_json(config / file)
    source[database] = str(path or "")
    table = _as_map(document.get(key), path or config)
    return {name: _as_map(value, path or config) for name, value in table.items()}


def _consumer_offsets(
    config: Path, is_broker_dead: bool, source: dict[str, str]
) -> dict[str, dict[int, int]]:
    """The committed offsets by "topic@group" and queue id, from RocksDB or JSON, whichever was written last; those of
    light message queues (LMQs), which have one queue, are there as queue 0. The path is put into ``source``."""
    place = _rocksdb_of(config, CONSUMER_OFFSETS, "consumerOffset.json", "lmqConsumerOffset.json")
    if place is not None:
        directory, family = place
        source[CONSUMER_OFFSETS] = str(directory)
        return {
            name: _int_map(_as_map(value, directory).get("offsetTable"), directory)
            for name, value in _entries(directory, family, is_broker_dead)
        }
    # The broker writes one of the two, depending on enableLmq; the other is from before it was switched.
    candidates = [config / "consumerOffset.json", config / "lmqConsumerOffset.json"]
    document, path = _read_json(max(candidates, key=_last_written_ns))
    source[CONSUMER_OFFSETS] = str(path or "")
    where = path or config
    offsets = {
        name: _int_map(table, where) for name, table in _as_map(document.get("offsetTable"), where).items()
    }
    lmq = _as_map(document.get("lmqOffsetTable"), where)
    return offsets | {name: {0: _integer(offset, where)} for name, offset in lmq.items()}


def _rocksdb_of(config: Path, database: str, *files: str) -> tuple[Path, str] | None:
    """Where RocksDB has the table ``database``: its directory and column family; None if there is none, or if one of
    the JSON ``files`` is newer, as the broker was switched back to them."""
    places = [(config / database, "default"), (config / _UNIFIED, _FAMILIES[database])]
    written = [(_last_change_ns(place[0]), place) for place in places if is_rocksdb(place[0])]
    if not written:
        return None
    written_ns, place = max(written)
    return place if written_ns >= max(_mtime_ns(config / file) for file in files) else None


def _last_change_ns(directory: Path) -> int:
    """When a file in ``directory`` was last changed, in ns; -1 without files."""
    return max((_mtime_ns(path) for path in directory.iterdir()), default=-1)


def _entries(directory: Path, family: str, is_broker_dead: bool) -> list[tuple[str, Any]]:
    """The names and JSON documents of a table in RocksDB at ``directory``. Raises CorruptionError for a document that
    does not parse."""
    entries = []
    with RocksdbCopy(directory, link_tables=is_broker_dead) as database:
        for key, value in database.items(family):
            try:
                entries.append((key.decode("utf-8"), loads(value)))
            except FastjsonError as error:
                raise CorruptionError(
                    f"{directory}: the value of {key!r} is not JSON: {error.message}"
                ) from error
    return entries


def _read_json(path: Path) -> tuple[Document, Path | None]:
    """The JSON document in the file ``path`` or, if that is missing, empty or broken, in its ``.bak``; and which of
    them it is from. An empty document and None if neither exists. Raises CorruptionError if none is readable but one is
    broken."""
    problem: CorruptionError | None = None
    for candidate in (path, path.with_name(f"{path.name}.bak")):
        try:
            document = _read_one(candidate)
        except CorruptionError as error:
            problem = problem or error
            continue
        if document is not None:
            return document
    if problem is not None:
        raise problem
    return {}, None


def _read_one(path: Path) -> tuple[Document, Path] | None:
    """The JSON document in the file ``path``, and the path; None if the file is missing, or empty as the broker is
    replacing it. Raises CorruptionError for anything that is no JSON object."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise open_failure(path, error) from error
    if not data.strip():
        return None
    try:
        return _as_map(loads(data), path), path
    except FastjsonError as error:
        raise CorruptionError(f"{path}: {error.message}") from error


def _as_map(value: Any, where: Path) -> dict[str, Any]:
    """``value``, if it is a JSON object; an empty one for null. Raises CorruptionError, which names the file
    ``where``."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CorruptionError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _int_map(value: Any, where: Path) -> dict[int, int]:
    """``value``, if it is a JSON object with integers as keys and values. Raises CorruptionError, which names the file
    ``where``."""
    try:
        return {int(key): _integer(number, where) for key, number in _as_map(value, where).items()}
    except ValueError as error:
        raise CorruptionError(f"{where}: expected integers as keys, and one is not: {error}") from error


def _integer(value: Any, where: Path) -> int:
    if not isinstance(value, int):
        raise CorruptionError(f"{where}: expected an integer, found {value!r}")
    return value


def _last_written_ns(path: Path) -> int:
    """When the file ``path`` or its ``.bak`` was last written, in ns; -1 if there is neither."""
    return max(_mtime_ns(path), _mtime_ns(path.with_name(f"{path.name}.bak")))


def _mtime_ns(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1
