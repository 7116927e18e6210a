"""Objects of real stores hold one TTL class each, and every message comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.spark.jobs.backfill import BackfillOptions
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.lmq_truth import EVERYTHING
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.spark.jobs.backfill_runs import run as backfill_in_parallel
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex, living_runs
from tiered.formats.keys import archive_prefix, parse_set_key
from tiered.model.queue import LMQ_PREFIX
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.rule_entries import RuleEntry
from tiered.settings.topic_rules import TopicRules

RealStore = Callable[[str], Path]
WHOLE_SETS = replace(SMALL, split_bytes=64 << 20)


def _classes(root: FileStore) -> dict[str, set[int]]:
    """Classes of the objects that hold each topic; checks that a set's key names its class."""
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    assert verify_archive(archive, depth="full").anomalies == []
    state, found = load(archive), dict[str, set[int]]()
    for page in living_runs(RunIndex(archive), state):
        for row in page.chunk.runs:
            place = page.chunk.objects[int(row["object"])]
            days = int(place["ttl_class_days"])
            found.setdefault(page.queues[int(row["queue"])].topic, set()).add(days)
            parts = parse_set_key(page.chunk.object_keys[int(place["key"])])
            assert parts is None or parts.batch_id.partition("_")[2] == (f"{days}d" if days else "")
    return found


@pytest.mark.parametrize("is_parallel", [False, True])
def test_topics_with_different_rules_do_not_share_objects(
    is_parallel: bool, real_store: RealStore, tmp_path: Path
) -> None:
    directory = real_store("E")
    topics = sorted(json.loads((directory / "store/config/topics.json").read_text())["topicConfigTable"])
    own = [topic for topic in topics if not topic.startswith(("%", "rmq_sys", "SELF", "TBW", "OFFSET"))]
    short, long = own[0], own[-1]
    rules = TopicRules(
        (RuleEntry(short, ttl="12h"), RuleEntry(long, ttl="20d"), RuleEntry("*", ttl="forever"))
    )
    root = FileStore(tmp_path / "archive")
    if is_parallel:
        options = BackfillOptions(settings=WHOLE_SETS, rules=rules)
        backfill_in_parallel(directory / "store", tmp_path / "archive", options=options)
    else:
        backfill(directory / "store", root, settings=WHOLE_SETS, rules=rules)
    found = _classes(root)
    assert {topic: days for topic, days in found.items() if days != {0}} == {
        topic: days for topic, days in ((short, {1}), (long, {30})) if topic in found
    }
    assert len({0, 1, 30} & set().union(*found.values())) >= 2
    assert check_against_truth(root, directory, "E") > 400


def test_lmqs_share_the_objects_of_their_parents(real_store: RealStore, tmp_path: Path) -> None:
    rules = TopicRules((RuleEntry(f"{LMQ_PREFIX}*", ttl="forever"), RuleEntry("*", ttl="7d")))
    root = FileStore(tmp_path)
    store = real_store("L") / "store"
    backfill(store, root, topic_filter=EVERYTHING, settings=WHOLE_SETS, rules=rules)
    lmqs = {topic: days for topic, days in _classes(root).items() if topic.startswith(LMQ_PREFIX)}
    assert lmqs and set(map(tuple, lmqs.values())) == {(7,)}


def test_a_bucket_holds_little_but_living_messages_after_gc(
    real_store: RealStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = '[{"pattern": "t_[a-k]*", "ttl": "1d"}, {"pattern": "t_[l-p]*", "ttl": "90d"}]'
    flags = ("--set", f"topics.rules={rules}", "--set", "retention.min_archived=1ms")
    url, store = f"file://{tmp_path}/archive", real_store("A")
    source = (str(store / "store"), url, "--broker-conf", str(store / "broker.conf"))
    assert main(["backfill", *source, *flags]) == 0
    assert main(["expire", url, *flags, "--yes", "--apply"]) == 0
    for _ in range(2):  # lists of pending deletions are collected by the one after
        assert main(["gc", url, "--apply", "--grace", "0s"]) == 0
    assert "expired 41,633 messages" in capsys.readouterr().out
    archive = PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix(CLUSTER, BROKER))
    living_bytes = 0.0
    for page in living_runs(RunIndex(archive), load(archive)):
        objects, runs = page.chunk.objects, page.chunk.runs
        of_object = np.bincount(runs["object"], runs["byte_count"], minlength=len(objects))
        living_bytes += float((objects["size_bytes"] * of_object / objects["raw_bytes"]).sum())
    assert sum(info.size_bytes for info in archive.list("")) <= 1.1 * living_bytes
