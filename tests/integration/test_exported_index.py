"""A real broker whose index files are gone answers from those `tiered index export` made of its archive."""

from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.cli import main
from tests.archive.index.broker_index import broker_settings
from tests.end_to_end.ground_truth import read_jsonl
from tests.end_to_end.offloading import FILTER, SMALL, backfill
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import MQADMIN, RocketMq, java_classes, recorded_settings
from tiered.formats.record import Record, decode_record
from tiered.object_store.file import FileStore
from tiered.remoting.client import BrokerClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSION = "5.3.3"
STORE = "A"
ALWAYS_MS = (1 << 63) - 1
QUERY_MESSAGE, QUERY_NOT_FOUND = 12, 22
BROKER_MAX = 64


@dataclass
class Case:
    """A broker on a copy of a real store, its index files replaced by exported ones."""

    original: Path
    broker: RocketMq
    exported: list[Path]

    def query(self, topic: str, key: str, begin: int = 0, end: int = ALWAYS_MS) -> list[Record]:
        """What the broker itself answers, in its order."""
        client = BrokerClient(self.broker.broker_address, 10.0)
        fields = {
            "topic": topic,
            "key": key,
            "maxNum": str(BROKER_MAX),
            "beginTimestamp": str(begin),
            "endTimestamp": str(end),
        }
        answer = client.call(QUERY_MESSAGE, fields)
        client.close()
        assert answer.code in (0, QUERY_NOT_FOUND), answer.remark
        return list(split(answer.body)) if answer.code == 0 else []

    def truth(self) -> Iterator[dict[str, Any]]:
        """What the original broker answered from its own index files, for archived topics."""
        for line in read_jsonl(self.original / "truth" / "query_message.jsonl.zst"):
            if FILTER.admits(line["topic"]):
                yield line


def is_whole_time(line: dict[str, Any]) -> bool:
    """Whether a recorded query has no time limits."""
    return bool(line["begin"] == 0 and line["end"] == ALWAYS_MS)


def split(body: bytes) -> Iterator[Record]:
    """Records one behind the other."""
    at = 0
    while at < len(body):
        (size,) = struct.unpack_from(">i", body, at)
        yield decode_record(body[at : at + size])
        at += size


@pytest.fixture(scope="module")
def case(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    try:
        java_classes(VERSION)
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ: {error}")
    original, directory = real_store(STORE), tmp_path_factory.mktemp("exported")
    backfill(original / "store", FileStore(directory / "archive"), settings=SMALL)
    store = directory / "store"
    shutil.copytree(original / "store", store)
    shutil.rmtree(store / "index")
    slots, items = broker_settings(original)
    command = ["index", "export", f"file://{directory}/archive", str(store / "index")]
    assert main([*command, "--slots", str(slots), "--items", str(items), "--json"]) == 0
    broker = RocketMq(VERSION, directory, recorded_settings(original / "broker.conf"))
    exported = sorted((store / "index").iterdir())
    broker.start()
    try:
        yield Case(original, broker, exported)
    finally:
        broker.stop()


def check_truth(case: Case) -> int:
    """Queries without time limits: the same messages as the original broker gave."""
    asked = 0
    archived = Archived(case)
    for line in case.truth():
        if not is_whole_time(line) or len(line["brokerPhys"]) >= line["maxNum"]:
            continue  # collisions with keys that are not archived have used up its answer
        found = [record.physical_offset for record in case.query(line["topic"], line["key"])]
        # The original also had keys of topics that are not archived: of these its answer has hash collisions only.
        expected = [phys for phys in line["brokerPhys"] if archived(phys)]
        assert sorted(found) == sorted(expected), line
        asked += 1
    return asked


class Archived:
    """Whether the record at a physical offset is of an archived topic."""

    def __init__(self, case: Case) -> None:
        self._log = case.original / "store" / "commitlog"
        self._file_bytes = min(path.stat().st_size for path in self._log.iterdir())

    def __call__(self, phys: int) -> bool:
        base = phys // self._file_bytes * self._file_bytes
        with (self._log / f"{base:020d}").open("rb") as file:
            file.seek(phys - base)
            (size,) = struct.unpack(">i", file.read(4))
            file.seek(phys - base)
            return FILTER.admits(decode_record(file.read(size)).topic)


def test_the_broker_answers_every_recorded_query_from_exported_files(case: Case) -> None:
    assert len(case.exported) > 3
    assert check_truth(case) > 150
    assert set(case.exported) <= set((case.broker.store / "index").iterdir())


def test_mqadmin_finds_messages_and_the_broker_continues_in_the_last_file(case: Case) -> None:
    line = next(
        line
        for line in case.truth()
        if line["topic"] == "t_keys"
        and is_whole_time(line)
        and len(line["brokerPhys"]) == 1
        and line["key"].isascii()
    )
    (record,) = case.query("t_keys", line["key"])
    assert record.uniq_key is not None
    name_server = ("-n", case.broker.name_server_address)
    key = ("-k", line["key"])
    deadline_s = time.monotonic() + 60
    printed = ""
    # A broker begun just now may not be known to the name server yet: then mqadmin ends well and prints nothing.
    while not printed and time.monotonic() < deadline_s:
        printed = case.broker.run_java(MQADMIN, "queryMsgByKey", "-t", "t_keys", *key, *name_server)
    assert record.uniq_key in printed
    files = sorted((case.broker.store / "index").iterdir())
    arguments = ("sendMessage", "-t", "t_one", "-p", "a body", "-k", "exported-and-on", *name_server)
    case.broker.run_java(MQADMIN, *arguments)
    (sent,) = case.query("t_one", "exported-and-on")
    assert sent.body() == b"a body"
    assert sorted((case.broker.store / "index").iterdir()) == files, "the last file had room"
