"""Which topics count as compacted, and when the broker's table is read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fetcher.policy.broker_files import CompactionTopics
from fetcher.policy.read_policy import ReadPolicy
from fetcher.policy.read_router import ReadRouter
from tiered.broker_store.store import open_broker_store
from tiered.errors import CorruptionError
from tiered.settings.topic_rules import is_compacted


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"attributes": {"cleanup.policy": "COMPACTION"}}, True),
        ({"attributes": {"cleanup.policy": "DELETE"}}, False),
        ({"attributes": {"cleanup.policy": 7}}, False),
        ({"attributes": None}, False),
        ({}, False),
        ("not a document", False),
    ],
)
def test_the_attribute_decides(config: object, expected: bool) -> None:
    assert is_compacted(config) is expected


def test_topics_of_a_store_are_read_again_when_the_broker_writes_them(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    original = real_store("H2") / "store"
    (tmp_path / "config").mkdir()
    (tmp_path / "commitlog").symlink_to(original / "commitlog")
    table = json.loads((original / "config" / "topics.json").read_text())
    path = tmp_path / "config" / "topics.json"
    path.write_text(json.dumps(table))
    with open_broker_store(tmp_path) as store:
        compacted = CompactionTopics(store)
        router = ReadRouter(None, compacted=compacted)  # type: ignore[arg-type]
        compacted.refresh()
        assert "t_compact_hot" in compacted and "t_plain" not in compacted
        assert router.policy_of("t_compact_hot") is ReadPolicy.DISABLE
        assert router.policy_of("t_plain") is ReadPolicy.NOT_IN_DISK
        path.write_text('{"topicConfigTable":')
        with pytest.raises(CorruptionError):
            compacted.refresh()
        assert "t_compact_hot" in compacted, "the last table that could be read stays"
        table["topicConfigTable"]["t_new"] = {"attributes": {"cleanup.policy": "COMPACTION"}}
        path.write_text(json.dumps(table))
        compacted.refresh()
        assert "t_new" in compacted and "t_compact_hot" in compacted
