"""Java consumers of messages that expire, in archive and proxy mode: they continue at the queue's new minimum, with
nothing else skipped."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from tests.end_to_end.offloading import backfill
from tests.integration.client_scene import (
    ask,
    need_clients,
    until,
)
from tests.integration.served_scene import Job, Served
from tests.servers.tiered_serve import tiered_serve
from tiered.object_store.file import FileStore
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.settings.sections import OffloadSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ("4.9.7", "5.5.0")
MANY_RUNS = OffloadSettings(batch_bytes=128 << 10, split_bytes=64 << 10, block_bytes=16 << 10)
RULES = 'topics.rules=[{"pattern": "t_keys", "max_bytes": "512KiB"}]'
BEGUN = 100
"""Messages of each queue that a group has read when more of them expire."""


def test_groups_below_the_floor_continue_at_the_minimum(
    real_store: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_clients(*VERSIONS)
    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"), settings=MANY_RUNS)
    url = f"file://{tmp_path}/archive"
    server, address = tiered_serve(url, tmp_path)
    with server:
        served = Served(tmp_path, url, address, server)
        everything = served.expected("t_keys")
        for version in VERSIONS:
            for queue_id in range(2):
                commit(address, f"G_{version[0]}", queue_id)
        limits = ("--set", RULES, "--set", "retention.min_archived=1ms", "--yes")
        assert main(["expire", url, *limits, "--apply", "--json"]) == 0
        expired = json.loads(capsys.readouterr().out)["rows"]
        left = served.expected("t_keys")
        assert min(line[1] for line in left) > BEGUN and left.total() == everything.total() - expired
        minimum = min(line[1] for line in left)
        until(lambda: shown_minimum(served) == minimum, "the server does not follow the archive", 30)
        for version in VERSIONS:
            for mode in ("push", "pull"):
                group = f"G_{version[0]}" if mode == "push" else f"G_{version[0]}_new"
                (rest,) = served.consume(version, Job(mode, "t_keys", left.total(), group))
                assert Counter(rest) == left, (version, mode)
        assert main(["gc", url, "--apply", "--grace", "0s"]) == 0
        (rest,) = served.consume("5.5.0", Job("lite", "t_keys", left.total(), "G_collected"))
        assert Counter(rest) == left
    assert main(["verify", url, "--full", "--strict"]) == 0


def commit(address: str, group: str, queue_id: int) -> None:
    """As a consumer that has read a part of the queue."""
    fields: dict[str, object] = {"consumerGroup": group, "topic": "t_keys", "commitOffset": BEGUN}
    code = RequestCode.UPDATE_CONSUMER_OFFSET
    assert ask(address, code, b"", **fields, queueId=queue_id).code == ResponseCode.SUCCESS


def shown_minimum(served: Served) -> int:
    """The smallest of the topic's minimum offsets, as mqadmin shows them."""
    (printed,) = served.mqadmin("5.5.0", "topicStatus -t t_keys")
    return min(int(line.split()[2]) for line in printed.splitlines() if line.startswith("fx-a"))
