"""The broker's JSON configuration: which file counts when several, broken or none are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from tests.broker_store.mapping_documents import MAPPINGS
from tiered.broker_store.config import (
    BrokerState,
    read_broker_state,
    read_topics,
    refuse_unknown_configuration,
    state_fingerprint,
    topic_names_backup,
)
from tiered.errors import CorruptionError, StoreLayoutError

TOPICS = '{"topicConfigTable":{"t":{"topicName":"t","readQueueNums":4}}}'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    return tmp_path / "config"


def written(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


def state(config: Path) -> BrokerState:
    return read_broker_state(config.parent)


def test_fresh_broker_has_nothing(tmp_path: Path) -> None:
    assert read_broker_state(tmp_path) == BrokerState()
    assert topic_names_backup(tmp_path) == frozenset()


@pytest.mark.parametrize("main", [None, "", "  \n", '{"topicConfigTable":{"t":', "[1]"])
def test_backup_is_read_when_the_file_is_missing_empty_or_broken(config: Path, main: str | None) -> None:
    if main is not None:
        (config / "topics.json").write_text(main)
    (config / "topics.json.bak").write_text(TOPICS)
    found = state(config)
    assert found.topics == {"t": {"topicName": "t", "readQueueNums": 4}}
    assert found.source["topics"].endswith("topics.json.bak")


def test_file_wins_over_its_backup(config: Path) -> None:
    (config / "topics.json").write_text(TOPICS)
    (config / "topics.json.bak").write_text(TOPICS.replace('"t"', '"old"'))
    assert set(state(config).topics) == {"t"}
    assert topic_names_backup(config.parent) == {"old"}


def test_broken_file_and_broken_backup_name_file_and_position(config: Path) -> None:
    (config / "topics.json").write_text('{"topicConfigTable":tru}')
    (config / "topics.json.bak").write_text("{")
    (config / "consumerOffset.json").write_text('{"offsetTable":{"t@g":{0:5}}}')
    found = state(config)
    assert found.damaged.keys() == {"topics"} and found.consumer_offsets == {"t@g": {0: 5}}
    with pytest.raises(CorruptionError, match=r"config/topics\.json: bad JSON at character 20"):
        read_topics(config.parent)


@pytest.mark.parametrize(
    "text", ['{"offsetTable":{"t@g":{0:"x"}}}', '{"offsetTable":{"t@g":{"a":1}}}', '{"offsetTable":[]}']
)
def test_wrong_shape_is_damage(config: Path, text: str) -> None:
    (config / "consumerOffset.json").write_text(text)
    assert "consumerOffset.json: expected" in state(config).damaged["consumer_offsets"]


def test_lmq_offsets(config: Path) -> None:
    text = '{"lmqOffsetTable":{"%LMQ%a@%LMQ%g":17},"offsetTable":{"t@g":{0:1,3:4}}}'
    (config / "lmqConsumerOffset.json").write_text(text)
    assert state(config).consumer_offsets == {"t@g": {0: 1, 3: 4}, "%LMQ%a@%LMQ%g": {0: 17}}


def test_of_both_offset_files_the_one_written_last_counts(config: Path) -> None:
    for name, offset, seconds in (("consumerOffset", 1, 1000), ("lmqConsumerOffset", 2, 2000)):
        path = config / f"{name}.json"
        path.write_text(f'{{"offsetTable":{{"t@g":{{0:{offset}}}}}}}')
        os.utime(path, (seconds, seconds))
    assert state(config).consumer_offsets == {"t@g": {0: 2}}
    os.utime(config / "consumerOffset.json", (3000, 3000))
    assert state(config).consumer_offsets == {"t@g": {0: 1}}


def test_delay_offsets_have_integer_keys(config: Path) -> None:
    (config / "delayOffset.json").write_text('{"offsetTable":{1:322,2:100\n\t}\n}')
    assert state(config).delay_offsets == {1: 322, 2: 100}


def test_fingerprint_changes_with_every_write(config: Path) -> None:
    before = state_fingerprint(config.parent)
    (config / "topics.json").write_text(TOPICS)
    after = state_fingerprint(config.parent)
    assert before != after == state_fingerprint(config.parent)
    (config / "topics.json").write_text(TOPICS + " ")
    assert state_fingerprint(config.parent) != after


def test_rocksdb_configuration_counts_unless_json_is_younger(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(real_store("C") / "store" / "config", tmp_path / "config")
    assert "t_one" in read_broker_state(tmp_path).topics
    assert state_fingerprint(tmp_path)
    (tmp_path / "config" / "topics.json").write_text(TOPICS)
    assert set(read_broker_state(tmp_path).topics) == {"t"}
    os.utime(tmp_path / "config" / "topics.json", (1000, 1000))
    assert "t_one" in read_broker_state(tmp_path).topics


def test_rocksdb_configuration_is_read_from_a_copy(real_store: Callable[[str], Path]) -> None:
    store = real_store("C") / "store"
    before = sorted(str(path) for path in store.rglob("*"))
    read_broker_state(store)
    read_broker_state(store, is_broker_dead=True)
    assert sorted(str(path) for path in store.rglob("*")) == before


def test_configuration_of_version_2_is_refused(config: Path) -> None:
    (config / "rdb").mkdir()
    (config / "rdb" / "CURRENT").write_text("MANIFEST-000001\n")
    with pytest.raises(StoreLayoutError, match="version 2"):
        refuse_unknown_configuration(config.parent)
    # Version 2 takes nothing over from version 1: what was written last counts.
    (config / "topics.json").write_text(TOPICS)
    written(config / "topics.json", 1000)
    with pytest.raises(StoreLayoutError, match="version 2"):
        refuse_unknown_configuration(config.parent)
    written(config / "rdb" / "CURRENT", 500)
    refuse_unknown_configuration(config.parent)


def test_a_backup_from_before_the_move_to_rocksdb_is_not_used(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is never written again: a topic in it would never count as deleted."""
    shutil.copytree(real_store("C") / "store" / "config", tmp_path / "config")
    for name in ("topics.json", "topics.json.bak"):
        (tmp_path / "config" / name).write_text(TOPICS)
        written(tmp_path / "config" / name, 1000)
    assert "t" not in read_broker_state(tmp_path).topics
    assert topic_names_backup(tmp_path) == frozenset()
    (tmp_path / "config" / "topics.json").touch()
    assert topic_names_backup(tmp_path) == {"t"}


def test_one_rocksdb_for_all_tables_counts_when_it_was_written_last(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of 5.5: the ones of before stay where they were."""
    shutil.copytree(real_store("C") / "store" / "config", tmp_path / "config")
    before = state_fingerprint(tmp_path)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    database = Rdict(str(tmp_path / "config" / "metadata"), options)
    for family, key, value in (
        ("topic", b"t", b'{"topicName":"t","readQueueNums":4}'),
        ("subscriptionGroup", b"g", b'{"groupName":"g"}'),
        ("consumerOffset", b"t@g", b'{"offsetTable":{0:5}}'),
    ):
        database.create_column_family(family, Options(raw_mode=True))[key] = value
    database.close()
    assert state_fingerprint(tmp_path) != before
    found = read_broker_state(tmp_path)
    assert set(found.topics) == {"t"} and found.topics["t"]["readQueueNums"] == 4
    assert set(found.subscription_groups) == {"g"}
    assert found.consumer_offsets == {"t@g": {0: 5}}
    for path in (tmp_path / "config" / "metadata").iterdir():
        written(path, 1000)
    assert "t_one" in read_broker_state(tmp_path).topics


@pytest.mark.parametrize("version", ["5.3.3", "5.5.0"])
@pytest.mark.parametrize("name", ["topicQueueMapping.json", "topicQueueMapping.json.bak"])
def test_static_topics_are_read_as_the_broker_keeps_them(config: Path, version: str, name: str) -> None:
    before = state_fingerprint(config.parent)
    shutil.copy(MAPPINGS / f"{version}.json", config / name)
    found = state(config).topic_queue_mappings["orders"]
    assert (found["bname"], found["epoch"], found["totalQueues"]) == ("fx-a", 1_700_000_000_123, 4)
    queues = {int(queue): items for queue, items in found["hostedQueues"].items()}
    assert sorted(queues) == [0, 2]
    former, latter = queues[2]
    assert former == {
        "bname": "fx-b",
        "endOffset": 500,
        "gen": 0,
        "logicOffset": 0,
        "queueId": 2,
        "startOffset": 0,
        "timeOfEnd": 1_700_000_000_000,
        "timeOfStart": 1_600_000_000_000,
    }
    assert (latter["bname"], latter["logicOffset"], latter["endOffset"]) == ("fx-a", 500, -1)
    assert (state_fingerprint(config.parent) != before) is (not name.endswith(".bak"))
