"""mqadmin's read-only commands print of an archive what they printed of its broker."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest

from rocketmq_tiered.cli import main
from tests.end_to_end.offloading import backfill
from tests.integration.client_scene import ask, until
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import MQADMIN, RocketMq, java_classes, recorded_settings, run_java
from tests.servers.tiered_serve import tiered_serve
from tiered.object_store.file import FileStore
from tiered.remoting.command import RequestCode, ResponseCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSION = "5.3.3"
UNIQUE_KEY = "FD00000000000000000000000000000224AA5FFD2B2767806D93AEDC"
COMMANDS = (
    "topicList",
    "topicList -c",
    "topicRoute -t t_keys",
    "topicRoute -t t_idle",
    "topicStatus -t t_one",
    "topicStatus -t t_idle",
    "topicClusterList -t t_idle",
    "consumerProgress",
    "consumerProgress -g G_part",
    "statsAll",
    "brokerConsumeStats -b ADDRESS",
    "getConsumerConfig -g G_part",
    "queryMsgByOffset -b fx-a -t t_one -i 0 -o 0",
    "topicRoute -t t_keys -l",
    "topicClusterList -t t_keys",
    "topicStatus -t %RETRY%G_part",
    "statsAll -t t_keys",
    "queryMsgByOffset -b fx-a -t t_keys -i 0 -o 2",
    f"queryMsgByUniqueKey -t t_keys -i {UNIQUE_KEY}",
    "queryCq -t t_one -q 0 -i 0 -c 5 -b ADDRESS",
    "allocateMQ -t t_keys -i 127.0.0.1,127.0.0.2",
    "printMsgByQueue -t t_one -a fx-a -i 0 -p true",
    "consumeMessage -t t_keys -b fx-a -i 0 -o 0 -c 3",
)
NOT_ARCHIVED = (
    "whichBrokerWhenConsumeSlowly",
    "rmq_sys_REVIVE_LOG",
    "rmq_sys_wheel_timer",
    "RMQ_SYS_TRANS_",
    "%RETRY%TOOLS_CONSUMER",
    "TOOLS_CONSUMER",
)
"""Topics of the broker itself are not archived. mqadmin's own group begins with its first pull."""


class Printed(NamedTuple):
    """What mqadmin printed of each command, by the broker and from its archive."""

    broker: list[str]
    archive: list[str]
    address: str
    url: str


@pytest.fixture(scope="module")
def printed(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Printed]:
    try:
        java_classes(VERSION)
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ: {error}")
    directory = tmp_path_factory.mktemp("tables")
    original = real_store("A")
    shutil.copytree(original / "store", directory / "store")
    broker = RocketMq(VERSION, directory, recorded_settings(original / "broker.conf"))
    with broker:
        for topic, queues in (("t_idle", "3"), ("%RETRY%G_part", "1")):
            name_server = broker.name_server_address
            broker.run_java("Admin", name_server, broker.broker_address, "create", "FxCluster", topic, queues)
        words = f"updateTopic -b {broker.broker_address} -t t_one -r 1 -w 1 -a +reserve.time=12"
        broker.run_java(MQADMIN, *words.split(), "-n", broker.name_server_address)
        commit(broker.broker_address)
        until(lambda: has_route(broker.name_server_address), "the broker does not register")
        by_broker = mqadmin(directory, broker.name_server_address, broker.broker_address)
    backfill(directory / "store", FileStore(directory / "archive"))
    url = f"file://{directory}/archive"
    server, address = tiered_serve(url, directory)
    with server:
        yield Printed(by_broker, mqadmin(directory, address, address), address, url)


def commit(address: str) -> None:
    """A group that has read a part of a topic, and one topic that has no messages."""
    group = {
        "groupName": "G_part",
        "consumeEnable": True,
        "retryQueueNums": 1,
        "retryMaxTimes": 16,
        "brokerId": 0,
    }
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    assert ask(address, code, orjson.dumps(group)).code == ResponseCode.SUCCESS
    for topic, queue_id, offset in (("t_keys", 0, 3), ("t_keys", 1, 5), ("t_idle", 2, 0)):
        fields: dict[str, object] = {"topic": topic, "queueId": queue_id, "commitOffset": offset}
        answer = ask(address, RequestCode.UPDATE_CONSUMER_OFFSET, b"", consumerGroup="G_part", **fields)
        assert answer.code == ResponseCode.SUCCESS


def has_route(name_server: str) -> bool:
    """Whether clients find the broker."""
    return ask(name_server, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="t_idle").code == ResponseCode.SUCCESS


def mqadmin(directory: Path, name_server: str, broker: str) -> list[str]:
    """The lines of each command in a fixed order, without addresses and rates."""
    path = directory / "commands.txt"
    rows = [[*command.replace("ADDRESS", broker).split(" "), "-n", name_server] for command in COMMANDS]
    path.write_text("".join("\t".join(row) + "\n" for row in rows), "utf-8")
    texts = run_java(VERSION, directory, "Tools", str(path)).split("=== ")[1:]
    return [alike(text.partition("\n")[2].replace(broker, "ADDRESS")) for text in texts]


def alike(text: str) -> str:
    """Sorted lines: tables come in no order. Rates of a broker that runs are those of its last minute."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(NOT_ARCHIVED)]
    lines = [re.sub(r" +\d+\.\d\d( +\d+\.\d\d)?( +\d+)+", " RATES", line) for line in lines]
    lines = [re.sub(r" +\d+\.\d\d +\d+ +NO_CONSUMER", " RATES NO_CONSUMER", line) for line in lines]
    return "\n".join(sorted(lines))


@pytest.mark.parametrize("command", COMMANDS)
def test_an_archive_prints_what_its_broker_printed(printed: Printed, command: str) -> None:
    at = COMMANDS.index(command)
    assert printed.broker[at] or command.startswith("topicClusterList")
    assert printed.archive[at] == printed.broker[at]


def test_the_time_to_live_of_a_topic_is_the_attribute_of_its_broker(
    printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", printed.url, "--json"]) == 0
    found = {row["topic"]: row for row in json.loads(capsys.readouterr().out)["queues"]}
    assert found["t_one"]["ttlMs"] == 12 * 3600_000, found["t_one"]
    assert found["t_keys"]["ttlMs"] is None


def test_a_message_that_is_sent_is_refused(printed: Printed) -> None:
    fields = {
        "producerGroup": "G_send",
        "topic": "t_idle",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": 0,
        "flag": 0,
        "properties": "",
        "reconsumeTimes": 0,
    }
    answer = ask(printed.address, RequestCode.SEND_MESSAGE, b"body", **fields)
    assert answer.code == ResponseCode.NO_PERMISSION
