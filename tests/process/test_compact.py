"""`tiered compact` on the archive of a real store: the same messages in far fewer objects.

`tiered compact-keys` on the archive of a real store: fewer messages, the latest one of each key, by all readers.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rocketmq_tiered
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


KEYED_CYCLES = ("--set", "offload.batch_bytes=262144")
HOT = "t_compact_hot"


def lines(run: Run, *arguments: Any) -> list[dict[str, Any]]:
    """The output of `tiered cat`."""
    code, out, err = run("cat", *arguments, "--format", "jsonl", "--body", "text")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_compact_keys_drops_what_is_replaced(
    run: Run, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    pack, url = real_store("H2"), f"file://{tmp_path}/archive"
    code, _, err = run("backfill", pack / "store", url, "--broker-conf", pack / "broker.conf", *KEYED_CYCLES)
    assert code == 0, err
    everything = lines(run, url, HOT)
    latest = lines(run, url, HOT, "--latest")
    last: dict[tuple[int, str], dict[str, Any]] = {}
    for message in everything:
        if message["keys"]:
            last[message["queueId"], message["keys"]] = message
    expected = [one for one in last.values() if one["bodyLen"]]
    expected.sort(key=lambda one: (one["queueId"], one["queueOffset"]))
    assert latest == expected
    plain = lines(run, url, "t_plain")

    out = run("compact-keys", url)[1]
    assert (
        "nothing to compact" in out
        and f"not compacted: t_compact_cold/0, {HOT}/0, {HOT}/1: committed less" in out
    )
    waiting = json.loads(run("compact-keys", url, "--json")[1])["waiting"]
    in_72_h = time.time() * 1000 + 72 * 3_600_000
    assert len(waiting) == 3 and all(abs(one["fromMs"] - in_72_h) < 600_000 for one in waiting)
    rule = f'topics.rules=[{{"pattern": "{HOT}", "key_compaction": "off"}}]'
    assert (
        f"not compacted: {HOT}/0, {HOT}/1: the broker compacts their topics"
        in run("compact-keys", url, "--set", rule)[1]
    )
    code, _, err = run("compact-keys", url, "--topic", "t_plain")
    assert (code != 0, "do not have the keys of topic t_plain compacted" in err) == (True, True)
    code, out, _ = run("compact-keys", url, "--topic", HOT, "--older-than", "0")
    assert code == 0 and "dry run, add --apply to compact:" in out
    dry = json.loads(run("compact-keys", url, "--topic", HOT, "--older-than", "0", "--json")[1])
    assert lines(run, url, HOT) == everything
    code, out, err = run(
        "compact-keys", url, "--topic", HOT, "--older-than", "0", "--apply", "--json", "--spool", tmp_path
    )
    document = json.loads(out)
    assert (code, document["applied"]) == (0, True), err
    names = ("queues", "keys", "messages", "newMessages", "bytes", "newBytes", "tombstones", "keyless")
    assert {name: document[name] for name in names} == {name: dry[name] for name in names}
    assert 0 < document["newMessages"] < document["messages"] < len(everything)

    left = lines(run, url, HOT)
    dropped = document["messages"] - document["newMessages"]
    assert len(left) == len(everything) - dropped
    whole = {(one["queueId"], one["queueOffset"]): one for one in everything}
    assert all(one == whole[one["queueId"], one["queueOffset"]] for one in left)
    assert lines(run, url, HOT, "--latest") == latest
    assert lines(run, url, "t_plain") == plain
    mine = [queue for queue in json.loads(run("ls", url, "--json")[1])["queues"] if queue["topic"] == HOT]
    assert [queue["messages"] for queue in mine] == [
        sum(one["queueId"] == queue["queueId"] for one in left) for queue in mine
    ]
    assert all(queue["minOffset"] == 0 and queue["keyCompaction"] for queue in mine)
    check_python(url, latest, left)
    check_commands(run, url, left, everything)
    out = run("compact-keys", url, "--topic", HOT, "--older-than", "0")[1]
    assert f"{HOT}/0, {HOT}/1: nothing new since the last round" in out

    for _ in range(2):
        assert run("verify", url, "--full")[0] == 0
        assert lines(run, url, HOT) == left
        assert run("gc", url, "--apply", "--grace", "0")[0] == 0
    assert run("compact", url, "--older-than", "0", "--apply", "--spool", tmp_path)[0] == 0
    assert run("verify", url, "--full")[0] == 0
    assert lines(run, url, HOT) == left


def check_python(url: str, latest: list[dict[str, Any]], left: list[dict[str, Any]]) -> None:
    """Messages by offset, key and time, and the views."""
    newest = {one["keys"]: one for one in sorted(latest, key=lambda one: one["storeTimestamp"])}
    with rocketmq_tiered.open(url) as archive:
        table = archive.table(HOT)
        assert set(table) == set(newest) and len(table) == len(newest)
        for key, line in newest.items():
            found = table[key]
            assert (found.queue_id, found.queue_offset) == (line["queueId"], line["queueOffset"])
            one = archive.latest(HOT, key)
            assert one is not None and bytes(one.data) == bytes(found.data)
            by_key = [
                (each.queue_id, each.queue_offset) for each in archive.find_by_key(HOT, key, limit=10**6)
            ]
            assert sorted(by_key) == sorted(
                (each["queueId"], each["queueOffset"]) for each in left if each["keys"] == key
            )
        assert archive.latest(HOT, "no such key") is None
        assert "no such key" not in table
        for number in (0, 1):
            queue = archive.queue(HOT, number)
            offsets = [one["queueOffset"] for one in left if one["queueId"] == number]
            hole = offsets[0] - 1
            assert [one.queue_offset for one in queue.messages(hole, limit=3)] == offsets[:3]
            times = {one["queueOffset"]: one["storeTimestamp"] for one in left if one["queueId"] == number}
            for offset in offsets[:: max(1, len(offsets) // 10)]:
                assert queue.timestamp_of(offset) == times[offset]
                at = queue.offset_by_time(times[offset])
                assert times[next(one for one in offsets if one >= at)] == times[offset]
                since = [one.queue_offset for one in queue.messages(since=times[offset])]
                assert since == [one for one in offsets if one >= since[0]]
                assert times[since[0]] >= times[offset]

    asyncio.run(check_async(url, newest))


async def check_async(url: str, newest: dict[str, dict[str, Any]]) -> None:
    """The same views in an event loop."""
    async with rocketmq_tiered.open_async(url) as archive:
        table = await archive.table(HOT)
        assert set(table) == set(newest) and len(table) == len(newest) and "no such key" not in table
        for key in list(newest)[:3]:
            found, one = await table.get(key), await archive.latest(HOT, key)
            assert found is not None and one is not None and bytes(one.data) == bytes(found.data)
            assert found.queue_offset == newest[key]["queueOffset"]
        assert await table.get("no such key") is None and await archive.latest(HOT, "no such key") is None


def check_commands(run: Run, url: str, left: list[dict[str, Any]], everything: list[dict[str, Any]]) -> None:
    """Messages by id: those that are left, and not those that were dropped."""
    kept = {(one["queueId"], one["queueOffset"]) for one in left}
    gone = next(one for one in everything if (one["queueId"], one["queueOffset"]) not in kept)
    assert run("query", url, "--id", left[0]["offsetMsgId"])[0] == 0
    assert run("query", url, "--id", gone["offsetMsgId"])[0] != 0
