"""`tiered republish`: what a broker gets of an archive, and what it gets twice."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rocketmq_tiered
from rocketmq_tiered.sending.position import locked
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.remoting.scripted_peer import peer
from tests.sending.target_broker import STORED_UNANSWERED, Stored, TargetScene
from tiered.formats.record import Record
from tiered.object_store.file import FileStore

Run = Callable[..., tuple[int, str, str]]
BUSY, SYSTEM_ERROR, ILLEGAL, FLUSH_TIMEOUT, NO_PERMISSION = 2, 1, 13, 10, 16


@pytest.fixture(scope="module")
def archive(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("republish")
    backfill(real_store("B") / "store", FileStore(directory))
    return f"file://{directory}"


def archived(url: str, topic: str) -> list[list[Record]]:
    """The records of each queue."""
    with rocketmq_tiered.open(url) as found:
        return [
            [message.record for message in found.queue(topic, queue.queue_id).messages()]
            for queue in found.queues(topic)
        ]


def keys_of(messages: list[Stored]) -> list[str]:
    return [message.properties["UNIQ_KEY"] for message in messages]


def all_keys(target: TargetScene) -> list[str]:
    return sorted(key for messages in target.stored.values() for key in keys_of(messages))


def keys_in(url: str, topic: str) -> list[str]:
    return sorted(str(record.uniq_key) for queue in archived(url, topic) for record in queue)


def test_a_message_arrives_as_it_was_sent_and_in_order(run: Run, archive: str) -> None:
    for topic in ("t_sizes", "t_props"):  # compressed bodies; odd properties
        queues = archived(archive, topic)
        with TargetScene({"copy": (len(queues), 6)}).running() as target:
            code, said, _ = run("republish", archive, "--to", target.address, "--topic-map", f"{topic}=copy")
        assert code == 0
        assert f"{sum(map(len, queues))} messages sent" in said
        for queue_id, records in enumerate(queues):
            for record, found in zip(records, target.stored["copy", queue_id], strict=True):
                assert found.body == record.stored_body
                assert found.born_timestamp == record.born_timestamp
                assert (found.sys_flag, found.flag) == (record.sys_flag & 0x703, record.flag)
                kept = {"KEYS", "TAGS", "UNIQ_KEY"} | {
                    name for name in record.properties if name[0].islower()
                }
                assert {name: record.properties.get(name) for name in kept} == {
                    name: found.properties.get(name) for name in kept
                }


def test_queues_of_a_topic_go_to_the_queues_there_are(run: Run, archive: str) -> None:
    with TargetScene({"t_sixteen": (3, 6)}).running() as target:
        assert run("republish", archive, "--to", target.address, "--topics", "t_sixteen")[0] == 0
    assert all_keys(target) == keys_in(archive, "t_sixteen")
    for queue_id, records in enumerate(archived(archive, "t_sixteen")):
        wanted = [str(record.uniq_key) for record in records]
        arrived = [key for key in keys_of(target.stored["t_sixteen", queue_id % 3]) if key in set(wanted)]
        assert arrived == wanted


@pytest.mark.parametrize("topic", ["t_txn", "t_timer", "t_delay", "t_lmqparent"])
def test_a_broker_delivers_at_once_what_was_transaction_timer_or_lmq(
    run: Run, archive: str, topic: str
) -> None:
    acted_on = {"TRAN_MSG", "PGROUP", "DELAY", "INNER_MULTI_DISPATCH", "REAL_TOPIC", "REAL_QID", "WAIT"}
    with TargetScene({"copy": (4, 6)}).running() as target:
        assert run("republish", archive, "--to", target.address, "--topic-map", f"{topic}=copy")[0] == 0
    found = [message for messages in target.stored.values() for message in messages]
    assert all_keys(target) == keys_in(archive, topic)
    assert not any(message.sys_flag & 0xC for message in found)
    names = {name for message in found for name in message.properties}
    assert not names & acted_on
    assert not {name for name in names if name.startswith("TIMER_")}


def test_an_inner_batch_arrives_as_its_messages_and_a_tombstone_without_a_body(
    run: Run, archive: str
) -> None:
    with TargetScene({"t_bcq": (2, 6), "t_compact": (2, 6)}).running() as target:
        assert run("republish", archive, "--to", target.address, "--topics", "t_bcq,t_compact")[0] == 0
    with rocketmq_tiered.open(archive) as found:
        for queue_id in (0, 1):
            messages = [
                one
                for message in found.queue("t_bcq", queue_id).messages()
                for one in message.inner or [message]
            ]
            assert [one.body for one in messages] == [one.body for one in target.stored["t_bcq", queue_id]]
            bodies = [message.body for message in found.queue("t_compact", queue_id).messages()]
            assert [one.body for one in target.stored["t_compact", queue_id]] == bodies
    assert any(not one.body for one in target.stored["t_compact", 0] + target.stored["t_compact", 1])


def test_a_second_run_sends_nothing_and_a_longer_one_the_rest(run: Run, archive: str) -> None:
    times = sorted(record.store_timestamp for queue in archived(archive, "t_four") for record in queue)
    middle_ms = times[len(times) // 2]
    with TargetScene({"copy": (4, 6)}).running() as target:
        command = ("republish", archive, "--to", target.address, "--topic-map", "t_four=copy")
        assert run(*command, "--until", middle_ms)[0] == 0
        first = len(all_keys(target))
        assert first == sum(time_ms < middle_ms for time_ms in times)
        code, said, _ = run(*command)
        assert code == 0 and "nothing is sent twice" in said
        assert f"{len(times) - first:,} messages sent" in said
        assert "0 messages sent" in run(*command)[1]
    assert all_keys(target) == keys_in(archive, "t_four")


def test_since_begins_there_and_an_earlier_since_needs_another_position(run: Run, archive: str) -> None:
    times = sorted(record.store_timestamp for queue in archived(archive, "t_tags") for record in queue)
    middle_ms = times[len(times) // 2]
    with TargetScene({"copy": (4, 6)}).running() as target:
        command = ("republish", archive, "--to", target.address, "--topic-map", "t_tags=copy")
        assert run(*command, "--since", middle_ms)[0] == 0
        assert len(all_keys(target)) == sum(time_ms >= middle_ms for time_ms in times)
        code, _, error = run(*command)
    assert code == 2 and "was sent from offset" in error and "--position" in error


def test_a_dry_run_counts_and_sends_nothing(run: Run, archive: str) -> None:
    topics = dict.fromkeys(("t_one", "t_two"), (1, 6))
    with TargetScene(topics).running() as target:
        command = ("republish", archive, "--to", target.address, "--topic-map", "t_one=t_two", "--dry-run")
        code, said, _ = run(*command, "--json")
        assert code == 0
        assert json.loads(said)["topics"] == [
            {"topic": "t_one", "to": "t_two", "queues": 1, "messages": 1080}
        ]
        assert "1,080 messages would be sent" in run(*command)[1]
    assert not target.sends


def test_a_broker_that_is_busy_or_leaves_loses_nothing(run: Run, archive: str) -> None:
    faults = {5: BUSY, 6: BUSY, 40: SYSTEM_ERROR, 60: STORED_UNANSWERED, 61: FLUSH_TIMEOUT, 90: BUSY}
    with TargetScene({"copy": (1, 6)}, lambda number: faults.get(number, 0)).running() as target:
        code, said, errors = run("republish", archive, "--to", target.address, "--topic-map", "t_one=copy")
    assert code == 0
    assert "a message was not sent and is sent again" in errors and "takes messages again" in errors
    assert "1 send had no answer and was repeated" in said
    wanted, arrived = (
        [str(record.uniq_key) for record in archived(archive, "t_one")[0]],
        keys_of(target.stored["copy", 0]),
    )
    assert len(arrived) == len(wanted) + 1
    assert list(dict.fromkeys(arrived)) == wanted


def test_a_message_that_the_broker_refuses_ends_the_run_or_is_skipped(run: Run, archive: str) -> None:
    sizes = [len(record.stored_body) for queue in archived(archive, "t_sizes") for record in queue]
    limit = sorted(sizes)[-3]
    with TargetScene({"copy": (4, 6)}, max_message_bytes=limit).running() as target:
        command = ("republish", archive, "--to", target.address, "--topic-map", "t_sizes=copy")
        code, _, error = run(*command)
        assert code == 2 and "is refused: the message's body has" in error and "maxMessageSize" in error
        code, said, _ = run(*command, "--skip-refused")
        assert code == 1 and "2 messages refused by the broker, and skipped" in said
    assert sum(map(len, target.stored.values())) == len(sizes) - 2


def test_a_second_cluster_sees_the_account_that_is_named_for_it_and_a_refused_one_moves_no_position(
    run: Run, archive: str, tmp_path: Path
) -> None:
    account = tmp_path / "target.yml"
    account.write_text("accessKey: target-account\nsecretKey: of-the-target\n")
    account.chmod(0o600)
    is_refused = [True]
    fault: Callable[[int], int] = lambda _: NO_PERMISSION if is_refused[0] else 0  # noqa: E731
    with TargetScene({"copy": (4, 6)}, fault).running() as target:
        command = ("republish", archive, "--to", target.address, "--topic-map", "t_one=copy")
        code, _, error = run(*command, "--set", f"broker.credentials_file={account}")
        assert code == 2 and "PUB on topic copy" in error and not target.stored
        assert target.accounts == {"target-account"}
        is_refused[0] = False
        assert run(*command, "--set", f"broker.credentials_file={account}")[0] == 0
        assert all_keys(target) == keys_in(archive, "t_one") and target.accounts == {"target-account"}
        target.accounts.clear()
        assert run(*command)[0] == 0 and target.accounts == {None}


def test_what_cannot_be_sent_is_refused_before_anything_is(run: Run, archive: str) -> None:
    with TargetScene({"t_one": (1, 6), "locked": (4, 4)}, name=BROKER, cluster=CLUSTER).running() as target:
        place = ("republish", archive, "--to", target.address)
        code, _, error = run(*place, "--topics", "t_one")
        assert code == 2 and "archived from" in error and "--topic-map t_one=NEW" in error
        code, _, error = run(*place, "--topic-map", "t_four=new")
        assert code == 3 and "mqadmin updateTopic" in error and "-t new -r 4 -w 4" in error
        code, _, error = run(*place, "--topic-map", "t_four=locked")
        assert code == 2 and "not writable" in error
        assert run(*place, "--topics", "t_nothing")[0] == 3
        assert run(*place, "--topics", "t_one", "--topic-map", "t_four=new")[0] == 2
        assert run("republish", archive, "--to", "nowhere")[0] == 2
        assert run(*place, "--topic-map", "t_four")[0] == 2
        assert run(*place, "--rate", "-1")[0] == 2
    assert not target.sends
    assert run("republish", archive, "--to", "127.0.0.1:1", "--topics", "t_one")[0] == 4


def test_a_name_server_names_the_brokers(run: Run, archive: str) -> None:
    scene = TargetScene({"copy": (2, 6)})
    with scene.running() as target, peer(scene.answer_as_name_server) as address:
        assert run("republish", archive, "--to", address, "--topic-map", "t_keys=copy")[0] == 0
        again = TargetScene({"copy": (2, 6)}, name="target-b")
        scene.brokers.append(again)  # of the same cluster: the position stays
        with again.running():
            assert (
                "0 messages sent"
                in run("republish", archive, "--to", address, "--topic-map", "t_keys=copy")[1]
            )
    assert all_keys(target) == keys_in(archive, "t_keys")


def test_retry_topics_dead_letters_and_lmqs_are_sent_only_if_named(run: Run, archive: str) -> None:
    topics = dict.fromkeys(("%DLQ%CG_t_retry", "again"), (1, 6))
    with rocketmq_tiered.open(archive) as found:
        topics |= dict.fromkeys(found.topics(), (16, 6))
    with TargetScene(topics).running() as target:
        code, said, _ = run("republish", archive, "--to", target.address, "--dry-run", "--json")
        assert code == 0
        assert not [one for one in json.loads(said)["topics"] if one["topic"].startswith("%")]
        dead = ("--topic-map", "%DLQ%CG_t_retry=again")
        assert run("republish", archive, "--to", target.address, *dead)[0] == 0
    assert len(target.stored["again", 0]) == 3
    assert "RETRY_TOPIC" not in target.stored["again", 0][0].properties


def test_the_rate_is_kept(run: Run, archive: str) -> None:
    with TargetScene({"copy": (4, 6)}).running() as target:
        begun_s = time.monotonic()
        code, _, _ = run(
            "republish", archive, "--to", target.address, "--topic-map", "t_order=copy", "--rate", "200"
        )
        assert code == 0
        assert time.monotonic() - begun_s > (180 - 200 * 0.05 - 1) / 200


def test_sigterm_ends_with_an_exact_position(run: Run, archive: str) -> None:
    def stop_at(number: int) -> int:
        if number == 300:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    with TargetScene({"copy": (4, 6)}, stop_at).running() as target:
        command = ("republish", archive, "--to", target.address, "--topic-map", "t_four=copy")
        code, said, _ = run(*command)
        assert code == 130 and "sent before the stop" in said
        assert 300 <= len(all_keys(target)) < 3840
        code, said, _ = run(*command)
        assert code == 0 and "nothing is sent twice" in said
    assert all_keys(target) == keys_in(archive, "t_four")


def test_two_runs_with_one_position_exclude_each_other(run: Run, archive: str, tmp_path: Path) -> None:
    position = tmp_path / "position.json"
    with TargetScene({"copy": (4, 6)}).running() as target, locked(position):
        words = ("--topic-map", "t_four=copy", "--position", position)
        code, _, error = run("republish", archive, "--to", target.address, *words)
    assert code == 2 and "another tiered republish" in error
    assert not target.sends


def test_a_position_of_another_archive_or_target_is_refused(run: Run, archive: str, tmp_path: Path) -> None:
    position = tmp_path / "position.json"
    words = ("--topic-map", "t_txn=copy", "--position", position)
    with TargetScene({"copy": (4, 6)}).running() as target:
        assert run("republish", archive, "--to", target.address, *words)[0] == 0
    with TargetScene({"copy": (4, 6)}, name="other").running() as target:
        code, _, error = run("republish", archive, "--to", target.address, *words)
        assert code == 2 and "TargetCluster/target-a" in error
        position.write_text("{}")
        code, _, error = run("republish", archive, "--to", target.address, *words)
    assert code == 2 and "not a position file" in error
