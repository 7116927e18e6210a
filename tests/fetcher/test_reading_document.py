"""The programs of docs/READING.md, run as they stand there but for the archive's address."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rocketmq_tiered
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore

URL = "memory://reading-document"
STORED_MS = 1795227708020
DOCUMENT = Path(__file__).parents[2] / "docs" / "READING.md"
PROGRAMS = [
    re.sub("^    ", "", block, flags=re.MULTILINE)
    for block in re.findall(r"(?:^    .*\n|^\n)+", DOCUMENT.read_text(), flags=re.MULTILINE)
    if "import rocketmq_tiered" in block
]


@pytest.fixture(scope="module", autouse=True)
def orders() -> Iterator[ObjectStore]:
    """The archive that the programs read: two messages, one of them tagged. It lives as long as its store."""
    store = open_store(URL)
    builder = ArchiveBuilder(PrefixedStore(store, "cluster/broker"))
    queue = QueueKey("orders", 0, 0)
    builder.commit(
        [
            Sent(queue, b"one", tags="paid", stored_ms=STORED_MS),
            Sent(queue, b"two", stored_ms=STORED_MS + 1),
        ]
    )
    yield store


@pytest.mark.parametrize("program", PROGRAMS, ids=["blocking", "settings", "loop"])
def test_programs_run_as_they_are_written(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiered.toml").write_text("[fetch]\nbytes_per_s = 1073741824\n")
    monkeypatch.chdir(tmp_path)
    exec(program.replace("s3://bucket/prefix", URL), {"__name__": "__main__"})
    assert "orders" in (said := capsys.readouterr().out) or "b'two'" in said


def test_filters_are_where_the_document_says() -> None:
    with rocketmq_tiered.open(URL) as archive:
        queue = archive.queue("orders", 0)
        for wanted in (
            rocketmq_tiered.tag_filter("paid || odd"),
            rocketmq_tiered.Sql92Filter("TAGS = 'paid'"),
        ):
            assert [message.body for message in queue.messages(message_filter=wanted)] == [b"one"]
