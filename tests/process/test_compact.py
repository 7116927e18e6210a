"""`tiered compact` on the archive of a real store: the same messages in far fewer objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.fetcher.broker_store_writer import WrittenStore

Run = Callable[..., tuple[int, str, str]]
CYCLES = ("--set", "offload.batch_bytes=131072")


def data_files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.suffix in (".so", ".sso")}


def test_compact_counts_joins_and_keeps_every_message(
    run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    pack, directory = real_store("F"), tmp_path / "archive"
    url = f"file://{directory}"
    code, _, err = run("backfill", pack / "store", url, "--broker-conf", pack / "broker.conf", *CYCLES)
    assert code == 0, err
    queues = json.loads(run("ls", url, "--json")[1])["queues"]
    topic, queue_id = next((queue["topic"], queue["queueId"]) for queue in queues if queue["messages"] > 500)
    messages = run("cat", url, topic, "--queue", queue_id, "--format", "jsonl")[1]
    before = data_files(directory)

    code, out, _ = run("compact", url, "--older-than", "0")
    assert code == 0
    for words in ("dry run, add --apply to join:", "to read and write again", "GETs before", "cost: USD"):
        assert words in out
    expected = json.loads(run("compact", url, "--older-than", "0", "--json")[1])
    free = tmp_path / "prices.toml"
    free.write_text("put_1000 = 0\nget_1000 = 0\nstorage_gib_month = 0\n")
    assert json.loads(run("compact", url, "--older-than", "0", "--prices", free, "--json")[1])["price"] == 0
    assert data_files(directory) == before
    for more in ((), ("--apply", "--spool", tmp_path / "none")):
        code, out, _ = run("compact", url, *more)
        assert code == 0
        assert f"{len(before)} objects are younger than compaction.min_age_ms (1 d)" in out
    young = json.loads(run("compact", url, "--json")[1])
    assert (young["objects"], young["youngObjects"]) == (0, len(before))
    assert data_files(directory) == before

    spool = tmp_path / "spool"
    code, out, _ = run("compact", url, "--older-than", "0", "--apply", "--spool", spool, "--json")
    document = json.loads(out)
    assert (code, document["applied"]) == (0, True)
    assert document["newObjects"] * 10 < document["objects"]
    done = document["done"]
    assert done["bytesSent"] <= done["bytesRead"]
    first = {name: expected[name] for name in ("objects", "newObjects", "messageBytes", "readerGetsSaved")}
    assert {name: document[name] for name in first} == first, "one round"
    assert done["bytesRead"] <= 1.01 * document["readBytes"]
    assert done["gets"] <= document["gets"]
    assert document["savingEachRead"] > 0
    assert not any(spool.iterdir())
    assert json.loads(run("compact", url, "--older-than", "0", "--json")[1])["objects"] == 0, "it ends"

    for _ in range(2):
        assert run("verify", url, "--full")[0] == 0
        assert json.loads(run("ls", url, "--json")[1])["queues"] == queues
        assert run("cat", url, topic, "--queue", queue_id, "--format", "jsonl")[1] == messages
        assert run("gc", url, "--apply", "--grace", "0")[0] == 0
    assert len(data_files(directory)) == len(before) - document["objects"] + document["newObjects"]


def test_compact_leaves_a_damaged_object_and_names_its_messages(run: Run, tmp_path: Path) -> None:
    store, directory = WrittenStore(tmp_path / "store"), tmp_path / "archive"
    url = f"file://{directory}"
    for _ in range(4):
        for number in range(20):
            store.put("orders", 0, b"%d" % number)
        assert run("backfill", store.path, url, "--cluster", "c", "--broker", "b")[0] == 0
    objects = sorted(data_files(directory), key=lambda path: path.stat().st_mtime_ns)
    objects[0].unlink()
    code, out, error = run("compact", url, "--older-than", "0", "--apply", "--spool", tmp_path / "spool")
    assert (code, "joined 3 objects" in out) == (1, True)
    (line,) = (line for line in error.splitlines() if "orders" in line)
    assert "orders queue 0: offsets 0 to 19 cannot be read" in line and objects[0].name in line
    code, out, _ = run("cat", url, "orders")
    assert (code, len(out.splitlines())) == (1, 60)
