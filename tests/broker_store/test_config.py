"""The broker's JSON configuration: which file counts when several, broken or none are there.

broker.conf and the names of broker and cluster.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from rocketmq_tiered.process.broker_side import topic_filter_of
from tests.broker_store.mapping_documents import MAPPINGS
from tiered.broker_store.conf import (
    BrokerNames,
    broker_conf,
    find_names,
    parse_delay_levels,
    parse_java_properties,
    read_broker_conf,
    require_names,
)
from tiered.broker_store.config import (
    BrokerState,
    read_broker_state,
    read_topics,
    refuse_unknown_configuration,
    state_fingerprint,
    topic_names_backup,
)
from tiered.errors import CorruptionError, NotFoundError, StoreLayoutError, UsageError
from tiered.settings.sections import Settings

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
    with pytest.raises(CorruptionError, match=r"config/topics\.json: invalid JSON at character 20"):
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


def test_properties_syntax_of_java() -> None:
    text = "\n".join(
        [
            "# comment = no",
            "! neither",
            "",
            "  a=1",
            "b : 2",
            "c   3",
            "d",
            "e=x\\",
            "   y",
            "f\\ g=h\\=i",
            "u=\\u0041\\t.",
            "p=C:\\\\dir",
            "a=last",
            "m==2",
            "n=trailing  ",
        ]
    )
    assert parse_java_properties(text) == {
        "a": "last",
        "b": "2",
        "c": "3",
        "d": "",
        "e": "xy",
        "f g": "h=i",
        "u": "A\t.",
        "p": "C:\\dir",
        "m": "=2",
        "n": "trailing  ",
    }


def test_continued_line_at_the_end_and_carriage_returns() -> None:
    assert parse_java_properties("a=1\r\nb=2\\") == {"a": "1", "b": "2"}


def test_defaults_are_the_brokers() -> None:
    conf = broker_conf({})
    assert conf.delay_levels_ms.tolist()[:5] == [1000, 5000, 10_000, 30_000, 60_000]
    assert len(conf.delay_levels_ms) == 18
    assert (conf.disk_max_used_ratio, conf.disk_clean_forcibly_ratio, conf.disk_warning_ratio) == (
        0.75,
        0.85,
        0.9,
    )
    assert (conf.file_reserved_hours, conf.delete_when_hours, conf.listen_port) == (72, (4,), 10911)
    assert conf.address == ""
    assert not conf.is_dledger


def test_what_an_archive_depends_on_is_read() -> None:
    conf = broker_conf(
        {
            "brokerClusterName": "c",
            "brokerName": "b",
            "brokerId": "1",
            "brokerRole": "SLAVE",
            "brokerIP1": "10.0.0.1",
            "listenPort": "20911",
            "storePathRootDir": "/s",
            "storePathCommitLog": "/d1/log, /d2/log",
            "readOnlyCommitLogStorePaths": "/d3/log",
            "messageDelayLevel": "1s 1d",
            "deleteWhen": "04;16",
            "fileReservedTime": "24",
            "diskMaxUsedSpaceRatio": "99",
            "enableDLegerCommitLog": "true",
        }
    )
    assert conf.commitlog_paths == (Path("/d1/log"), Path("/d2/log"), Path("/d3/log"))
    assert (conf.address, conf.is_slave, conf.is_dledger) == ("10.0.0.1:20911", True, True)
    assert conf.delay_levels_ms.tolist() == [1000, 86_400_000]
    assert (conf.disk_max_used_ratio, conf.delete_when_hours) == (0.95, (4, 16))


def test_a_comment_may_be_in_any_encoding(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_bytes("# 集群名称\nbrokerClusterName=c\nbrokerName=b\n".encode("gbk"))
    conf = read_broker_conf(path)
    assert (conf.cluster, conf.broker) == ("c", "b")


def test_shares_of_the_disk_are_confined_as_the_broker_confines_them() -> None:
    names = ("diskMaxUsedSpaceRatio", "diskSpaceCleanForciblyRatio", "diskSpaceWarningLevelRatio")
    for given, expected in ((99, (0.95, 0.85, 0.90)), (1, (0.10, 0.30, 0.35)), (40, (0.40, 0.40, 0.40))):
        conf = broker_conf({name: str(given) for name in names})
        assert (conf.disk_max_used_ratio, conf.disk_clean_forcibly_ratio, conf.disk_warning_ratio) == expected


@pytest.mark.parametrize("blank", [" ", "\t"])
def test_a_number_with_a_blank_behind_it_is_passed_over_as_the_broker_does(blank: str) -> None:
    conf = broker_conf(
        parse_java_properties(f"fileReservedTime=720{blank}\ndiskMaxUsedSpaceRatio=95{blank}\n")
    )
    assert (conf.file_reserved_hours, conf.disk_max_used_ratio) == (72, 0.75)


@pytest.mark.parametrize(
    ("properties", "is_rocksdb"),
    [
        ({}, False),
        ({"storeType": "defaultRocksDB"}, True),
        ({"rocksdbCQDoubleWriteEnable": "true"}, False),
        ({"rocksdbCQDoubleWriteEnable": "true", "combineCQPreferCQType": "defaultRocksDB"}, True),
        ({"rocksdbCQDoubleWriteEnable": "false", "combineCQPreferCQType": "defaultRocksDB"}, False),
    ],
)
def test_which_consume_queues_the_broker_reads(properties: dict[str, str], is_rocksdb: bool) -> None:
    assert broker_conf(properties).reads_rocksdb_queues == is_rocksdb


@pytest.mark.parametrize(
    ("key", "value"),
    [("listenPort", "abc"), ("messageDelayLevel", "5x"), ("deleteWhen", "25"), ("fileReservedTime", "1.5")],
)
def test_impossible_values_name_file_and_key(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "broker.conf"
    path.write_text(f"{key}={value}\n")
    with pytest.raises(UsageError, match=f"{path}: {key}") as caught:
        read_broker_conf(path)
    assert caught.value.exit_code == 2


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        read_broker_conf(tmp_path / "broker.conf")


def test_delay_levels_are_numbers_with_units() -> None:
    assert parse_delay_levels(" 1s  2m 3h ").tolist() == [1000, 120_000, 10_800_000]


def test_real_conf(real_store: Callable[[str], Path]) -> None:
    conf = read_broker_conf(real_store("A") / "broker.conf")
    assert (conf.cluster, conf.broker, conf.address) == ("FxCluster", "fx-a", "127.0.0.1:23326")


OWN = {"perm": 7, "readQueueNums": 1, "writeQueueNums": 1}
OTHER = {"perm": 6, "readQueueNums": 1, "writeQueueNums": 1}


def test_names_from_topics_the_broker_names_after_itself() -> None:
    topics = {"c_REPLY_TOPIC": OTHER, "c": OTHER, "rmq_sys_SYNC_BROKER_MEMBER_b": OTHER, "t": OTHER}
    assert find_names(None, topics) == BrokerNames("c", "b")


def test_users_topic_that_ends_like_a_reply_topic_does_not_confuse() -> None:
    topics = {"c_REPLY_TOPIC": OTHER, "c": OTHER, "x_REPLY_TOPIC": OTHER}
    assert find_names(None, topics).cluster == "c"


def test_4_9_names_by_the_topic_others_inherit_from() -> None:
    cluster = {"perm": 7, "readQueueNums": 16, "writeQueueNums": 16}
    topics = {"c_REPLY_TOPIC": OTHER, "c": cluster, "b": OWN, "SELF_TEST_TOPIC": OWN, "t": OTHER}
    assert find_names(None, topics) == BrokerNames("c", "b")


def test_conf_wins_over_topics() -> None:
    topics = {"c_REPLY_TOPIC": OTHER, "rmq_sys_SYNC_BROKER_MEMBER_b": OTHER}
    assert find_names(broker_conf({"brokerName": "other"}), topics) == BrokerNames("c", "other")


def test_two_candidates_are_none() -> None:
    topics = {"b1": OWN, "b2": OWN, "c1_REPLY_TOPIC": OTHER, "c2_REPLY_TOPIC": OTHER}
    assert find_names(None, topics) == BrokerNames("", "")


def test_unknown_names_must_be_given() -> None:
    with pytest.raises(UsageError, match=r"the name of the broker cannot be found in /s; .*--broker NAME$"):
        require_names(BrokerNames("c", ""), "/s")
    with pytest.raises(
        UsageError, match=r"cluster and of the broker .*--broker-conf FILE, or --cluster NAME and"
    ):
        require_names(BrokerNames("", ""), "/s")
    assert require_names(BrokerNames("c", "b"), "/s") == BrokerNames("c", "b")


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"traceTopicEnable": "true", "msgTraceTopicName": "traces"}, "traces"),
        ({"traceTopicEnable": " TRUE ", "msgTraceTopicName": " traces "}, "traces"),
        ({"traceTopicEnable": "true"}, ""),
        # The broker then makes no such topic: one of this name is a user's.
        (
            {"msgTraceTopicName": "traces"},
            "",
        ),
        ({"traceTopicEnable": "false", "msgTraceTopicName": "traces"}, ""),
    ],
)
def test_the_broker_s_own_trace_topic_is_its_own_whatever_its_name(
    properties: dict[str, str], expected: str
) -> None:
    conf = broker_conf(properties)
    assert conf.trace_topic == expected
    topics = topic_filter_of(Settings(), conf, "c", "b")
    assert topics.is_system("traces") is (expected == "traces") is not topics.admits("traces")
    assert topics.is_system("RMQ_SYS_TRACE_TOPIC") and not topics.is_system("orders")
    assert topic_filter_of(Settings(), None, "c", "b").admits("traces")
