"""broker.conf and the names of broker and cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_tiered.process.broker_side import topic_filter_of
from tiered.broker_store.conf import broker_conf, parse_delay_levels, parse_properties, read_broker_conf
from tiered.broker_store.names import BrokerNames, find_names, require_names
from tiered.errors import NotFoundError, UsageError
from tiered.settings.sections import Settings


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
    assert parse_properties(text) == {
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
    assert parse_properties("a=1\r\nb=2\\") == {"a": "1", "b": "2"}


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
    conf = broker_conf(parse_properties(f"fileReservedTime=720{blank}\ndiskMaxUsedSpaceRatio=95{blank}\n"))
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
        (
            {"msgTraceTopicName": "traces"},
            "",
        ),  # then the broker makes no such topic: one of this name is a user's
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
