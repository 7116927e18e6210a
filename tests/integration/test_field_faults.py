"""Logs that do not continue the archive, and objects that are gone, beside real brokers: nothing is archived, hidden or
lost without a word, and everything an operator looks at says so within 30 seconds."""

import json
import re
import shutil
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.client_scene import ask, until
from tests.integration.fault_scene import (
    LIMIT_S,
    Watched,
    delete_old_files,
    fault_scene,
    log_end,
    swap_store,
)
from tests.integration.live_scene import finish
from tests.integration.operator_view import Signs
from tests.integration.troubles import attention, state_is
from tests.servers.child import free_port
from tests.servers.running_store import RunningStore
from tests.servers.tiered_serve import tiered_serve
from tiered.errors import UnavailableError
from tiered.remoting.command import RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DIVERGED = state_is("diverged")
EMPTIED = Signs("shares nothing with the archive", "put the broker's log back", DIVERGED)
UNMOUNTED = Signs("does not exist|no commitlog file", "mount", state_is("blocked"))


def hidden(count: int) -> Signs:
    """Of a log that hid so many messages."""
    return Signs(
        rf"{count:,} archived messages that it lacks are hidden", "--histories", attention("diverged-log")
    )


def visible(watched: Watched) -> int:
    """Messages that `tiered ls` counts."""
    listed = json.loads(watched.sidecar.tiered("ls", watched.sidecar.url, "--json").stdout)
    return sum(queue["messages"] for queue in listed["queues"])


def hidden_messages(watched: Watched) -> list[int]:
    """Hidden messages of each log history that `tiered ls --histories` lists."""
    listed = json.loads(watched.sidecar.tiered("ls", watched.sidecar.url, "--histories", "--json").stdout)
    return [history["hiddenMessages"] for history in listed["histories"]]


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3", "5.5.0"])
def test_an_emptied_store_hides_nothing_until_it_is_allowed_and_comes_back_without_an_upload(
    version: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    with fault_scene(version, tmp_path, minio_url) as scene:
        broker = scene.broker("mq")
        watched = scene.watch("owner", broker)
        sidecar = watched.sidecar
        sent = watched.archive(1000)
        stored = watched.stored()

        swap_store(broker, "whole")
        watched.named(watched.begin(), UNMOUNTED, 503, "TieredBlocked")
        broker.broker.start()
        broker.create_topic("live0", 4)
        assert watched.send(1) == 1
        watched.named(watched.begin(), EMPTIED, 503, "TieredLogDiverged")
        assert (watched.stored(), visible(watched), hidden_messages(watched)) == (stored, sent, [0])
        assert sidecar.stop() == 2

        watched.case.set(ARCHIVE__REPLACE_LOG="true")
        view = watched.begin()
        sidecar.start()
        watched.named(view, hidden(sent), 200, "TieredMessagesHidden")
        sidecar.wait_until_archived(60)
        assert (visible(watched), hidden_messages(watched)) == (1, [sent, 0])
        assert watched.stored()[0] == stored[0] + 1
        stored = watched.stored()

        swap_store(broker, "emptied", "whole")
        view = watched.after(broker.broker.start)
        watched.named(
            view,
            Signs("1 archived message that it lacks is hidden", "--histories", attention("diverged-log")),
            200,
            "",
        )
        assert (visible(watched), hidden_messages(watched)) == (sent, [0, 1, 0])
        assert watched.stored() == stored, "nothing is uploaded twice"
        sent += watched.send(200)
        sidecar.wait_until_archived(60)
        assert finish(sidecar).shown == sent


def test_a_second_broker_of_the_same_name_never_takes_an_idle_owner_over(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    with fault_scene("5.3.3", tmp_path, minio_url) as scene:
        watched = scene.watch("owner", scene.broker("mq"), PROCESS__TAKE_OVER_LAG_MS=5000)
        sent = watched.archive(1000)
        longer = scene.broker("longer")
        other = scene.watch("other", longer, PROCESS__TAKE_OVER_LAG_MS=5000)
        other.sidecar.url = watched.sidecar.url
        assert other.send(2000) > sent
        stored, view = watched.stored(), other.begin()
        other.sidecar.start()
        signs = Signs("another broker of this name owns the archive", "a name of its own", DIVERGED)
        other.named(view, signs, 503, "TieredLogDiverged")
        time.sleep(15)  # thrice what a standby waits for
        assert other.sidecar.status()["state"] == "diverged"
        status = watched.sidecar.status()
        assert (status["state"], status["epoch"], watched.stored()) == ("following", 1, stored)
        assert other.sidecar.stop() == 2
        longer.broker.kill()
        arguments = (
            "backfill",
            str(longer.store),
            watched.sidecar.url,
            "--broker-conf",
            str(longer.broker_conf),
        )
        assert watched.sidecar.tiered(*arguments).returncode == 2
        sent += watched.send(100)
        watched.sidecar.wait_until_archived(60)
        assert finish(watched.sidecar).shown == sent


def test_an_older_copy_and_the_newer_log_put_back(tmp_path: Path, minio_url: RunningStore) -> None:
    with fault_scene("5.3.3", tmp_path, minio_url) as scene:
        broker = scene.broker("mq")
        watched = scene.watch("owner", broker)
        sidecar = watched.sidecar
        kept = watched.archive(500)
        broker.broker.stop(timeout_s=40)
        shutil.copytree(broker.store, broker.store.with_name("older"))
        broker.broker.start()
        lost = watched.send(1000)
        sidecar.wait_until_archived(60)
        stored = watched.stored()
        swap_store(broker, "newer", "older")
        watched.named(watched.after(broker.broker.start), hidden(lost), 200, "TieredMessagesHidden")
        assert (visible(watched), hidden_messages(watched)) == (kept, [lost, 0])
        swap_store(broker, "older", "newer")
        broker.broker.start()
        until(lambda: visible(watched) == kept + lost, "the messages do not come back", 60)
        assert watched.stored() == stored and sum(hidden_messages(watched)) == 0
        assert finish(sidecar).shown == kept + lost


def test_a_sidecar_that_was_away_longer_than_the_broker_keeps_files_continues_with_gaps(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    with fault_scene("5.3.3", tmp_path, minio_url) as scene:
        broker = scene.broker("mq")
        watched = scene.watch("owner", broker)
        sidecar = watched.sidecar
        sent = watched.archive(500)
        sidecar.kill()
        archived_phys = log_end(broker)
        watched.send(6000)
        shutil.rmtree(watched.case.directory / "state" / "pins", ignore_errors=True)
        delete_old_files(broker, archived_phys)
        view = watched.begin()
        sidecar.start()
        signs = Signs("4 gaps|gap recorded", "tiered ls", attention("gaps"))
        watched.named(view, signs, 200, "TieredGapRecorded")
        sidecar.wait_until_archived(60)
        assert visible(watched) > sent and hidden_messages(watched) == [0]
        assert sidecar.stop() == 0
        assert sidecar.tiered("verify", sidecar.url, "--full").returncode == 0


def test_a_slave_that_becomes_the_master_continues_and_the_former_master_hides_nothing(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    with fault_scene("5.3.3", tmp_path, minio_url) as scene:
        master = scene.broker("master", name_servers=2)
        owner = scene.watch("owner", master, PROCESS__TAKE_OVER_LAG_MS=5000)
        sent = owner.archive(1000)
        slave = scene.slave("slave", master)
        standby = scene.watch("standby", slave, PROCESS__TAKE_OVER_LAG_MS=5000)
        standby.sidecar.url = owner.sidecar.url
        standby.sidecar.start()
        until(lambda: standby.sidecar.status().get("state") == "standby", "it does not stand by", 60)

        owner.sidecar.kill()
        master.broker.kill()
        slave.restart_with({"brokerRole": "ASYNC_MASTER", "brokerId": 0})
        slave.create_topic("live0", 4)
        sent += standby.send(200)
        until(lambda: standby.sidecar.status().get("epoch") == 2, "it does not take over", 60)
        standby.sidecar.wait_until_archived(60)
        assert (visible(standby), hidden_messages(standby)) == (sent, [0])

        master.name_server_address = master.name_server_addresses[1]
        master.restart_with({"namesrvAddr": master.name_server_address})
        assert owner.send(500) > 200
        view = owner.begin()
        owner.sidecar.start()
        signs = Signs("another writer owns the archive", "--take-over", DIVERGED)
        owner.named(view, signs, 503, "TieredLogDiverged")
        time.sleep(15)  # thrice what a standby waits for
        assert owner.sidecar.status()["state"] == "diverged" and owner.sidecar.stop() == 2
        assert standby.sidecar.status()["state"] == "following"
        assert (visible(standby), hidden_messages(standby)) == (sent, [0])
        assert finish(standby.sidecar).shown == sent


UNREADABLE = Signs(
    r"archived messages? cannot be read: live0 queue \d", "restore the object", attention("unreadable")
)


def test_a_missing_object_is_named_by_server_and_owner_and_the_rest_is_read(
    tmp_path: Path, minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio_url.environment().items():
        monkeypatch.setenv(name, value)
    with fault_scene("5.3.3", tmp_path, minio_url) as scene:
        watched = scene.watch("owner", scene.broker("mq"), **KEEPING)
        sidecar, url = watched.sidecar, watched.sidecar.url
        sent = watched.archive(100)
        for _ in range(5):  # so many objects that compaction is due
            sent += watched.send(100)
            sidecar.wait_until_archived(60)
        check_rules_of_the_owner(watched)
        port = free_port()
        server, address = tiered_serve(url, tmp_path, "--set", f"admin.port={port}")
        server.start()
        scene.opened.callback(server.stop)
        if scene.prometheus is not None:
            scene.prometheus.scrape("serve", f"127.0.0.1:{port}")
        key = min(watched.objects())
        with watched.without(key):
            begun_s = time.monotonic()
            read_all(address)
            admin = f"http://127.0.0.1:{port}"
            until(
                lambda: re.search(UNREADABLE.cause, fetched(f"{admin}/ready")) is not None,
                "/ready is silent",
                LIMIT_S,
            )
            assert re.search(UNREADABLE.step, fetched(f"{admin}/ready"))
            assert re.search(
                r"(?m)^rocketmq_tiered_store_unreadable_messages(\{.*\})? [1-9]", fetched(f"{admin}/metrics")
            )
            assert json.loads(fetched(f"{admin}/status.json"))["unreadable"][0]["objectKey"] in key
            until(lambda: "cannot be read" in server.log.read_text(), "the log is silent", LIMIT_S)
            assert time.monotonic() - begun_s < LIMIT_S
            Watched("serve", watched.case, scene.prometheus).await_alert("TieredMessagesUnreadable")

            assert sidecar.stop() == 0
            watched.case.set(COMPACTION__EVERY_MS=1000, COMPACTION__MIN_AGE_MS=0)
            view = watched.begin()
            sidecar.start()
            seen = watched.named(view, UNREADABLE, 200, "TieredMessagesUnreadable")
            assert "the broker still has them" in seen.said["status"]
            printed = sidecar.tiered("cat", url, "--all")
            assert printed.returncode == 1 and sent / 2 < printed.stdout.count("\n") < sent, printed.stderr
            assert "cannot be read" in printed.stderr
        until(lambda: "unreadable" not in view.texts()["status"], "the finding stays", 60)
        assert finish(sidecar).shown == sent


KEEPING = {
    "RETENTION__TTL": "1s",
    "RETENTION__MIN_ARCHIVED": "1ms",
    "TOPICS__RULES": '[{"pattern": "live0", "ttl": "forever"}]',
}
"""Only the rule keeps the topic."""


def check_rules_of_the_owner(watched: Watched) -> None:
    """`tiered expire` without the owner's settings uses its rules, and refuses others."""
    sidecar, sent = watched.sidecar, visible(watched)
    done = sidecar.tiered("expire", sidecar.url, "--apply", "--yes")
    assert done.returncode == 0 and "nothing expires" in done.stdout, done
    done = sidecar.tiered("expire", sidecar.url, "--apply", "--yes", "--set", "topics.rules=[]")
    assert done.returncode == 2 and "pattern=live0 ttl=forever" in done.stderr, done
    assert visible(watched) == sent


def read_all(address: str) -> None:
    """Pull each queue from its begin until a pull does not advance."""
    for queue in range(4):
        fields = {
            "consumerGroup": "G",
            "topic": "live0",
            "queueId": queue,
            "maxMsgNums": 32,
            "sysFlag": 0,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subVersion": 0,
            "subscription": "*",
        }
        offset, following = -1, 0
        while following > offset:
            offset = following
            with suppress(UnavailableError):
                answer = ask(address, RequestCode.PULL_MESSAGE, queueOffset=offset, **fields)
                following = int(answer.ext_fields.get("nextBeginOffset", offset))


def fetched(url: str) -> str:
    """The body of a page."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        body: str = answer.read().decode()
        return body
