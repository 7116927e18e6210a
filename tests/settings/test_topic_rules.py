"""Rules of topics: what applies to a topic, and what set it.

Rules in force: what the owner has committed counts for every command, and a different setting is refused.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiered.broker_store.config import read_broker_state
from tiered.errors import CorruptionError, UsageError
from tiered.settings.load import LoadedSettings, flag_assignments, load_settings
from tiered.settings.quantities import BadValueError, duration_ms, written_duration
from tiered.settings.rules_in_force import (
    RULES,
    differences,
    grace_in_force,
    rules_document,
    with_rules_in_force,
)
from tiered.settings.topic_rules import TopicRule, TopicRules

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
GIB = 1 << 30
FILE = """
[retention]
ttl = "30d"

[[topics.rules]]
pattern = "orders-*"
ttl = "7d"
max_bytes = "10GiB"

[[topics.rules]]
pattern = "*-audit"
ttl = "forever"
read_policy = "force"
"""


def _rules(**flags: Any) -> TopicRules:
    return TopicRules.of(
        load_settings(flags={k.replace("__", "."): ("test", v) for k, v in flags.items()}).settings
    )


def _table(hours: object) -> dict[str, Any]:
    return {"t": {"topicName": "t", "attributes": {"reserve.time": hours}}}


def test_the_first_rule_that_matches_applies_alone(tmp_path: Path) -> None:
    path = tmp_path / "tiered.toml"
    path.write_text(FILE)
    rules = TopicRules.of(load_settings(path).settings)
    orders = "rule 1: orders-*"
    assert rules.of_topic("orders-audit") == TopicRule(
        "orders-audit", 7 * DAY_MS, 72 * HOUR_MS, orders, 10 * GIB, orders, "NOT_IN_DISK", "read.policy"
    ), "the second rule matches as well: its read policy does not apply"
    audit = rules.of_topic("x-audit", {"x-audit": {"attributes": {"reserve.time": "24"}}})
    assert (audit.ttl, audit.ttl_from, audit.read_policy) == ("forever", "rule 2: *-audit", "FORCE")
    assert (audit.max_bytes, audit.max_bytes_from) == (None, "default")
    assert (rules.of_topic("x").ttl, rules.of_topic("x").ttl_from) == ("30d", "retention.ttl")
    assert rules.entries[0].to_json() == tomllib.loads(FILE)["topics"]["rules"][0] | {"max_bytes": 10 * GIB}


@pytest.mark.parametrize(
    ("hours", "ttl"),
    [
        ("24", "1d"),
        (36, "36h"),
        ("0", "30d"),
        ("-1", "30d"),
        ("", "30d"),
        ("soon", "30d"),
        (None, "30d"),
        ("1e9", "30d"),
    ],
)
def test_the_attribute_of_the_topic_counts_where_it_is_positive(hours: object, ttl: str) -> None:
    rule = _rules(retention__ttl="30d").of_topic("t", _table(hours))
    assert (rule.ttl, rule.ttl_from) == (
        ttl,
        "retention.ttl" if ttl == "30d" else "topic attribute reserve.time",
    )
    assert (
        _rules(retention__ttl="30d", retention__from_broker=False).of_topic("t", _table(hours)).ttl == "30d"
    )
    assert _rules(topics__rules=[{"pattern": "t", "ttl": "9h"}]).of_topic("t", _table(hours)).ttl == "9h"
    sized = _rules(topics__rules=[{"pattern": "t", "max_bytes": 1}], retention__ttl="30d").of_topic(
        "t", _table(hours)
    )
    assert (sized.ttl, sized.max_bytes) == (ttl, 1), (
        "a rule without a time to live leaves it to the attribute"
    )


@pytest.mark.parametrize(
    "table", [{}, {"t": None}, {"t": {}}, {"t": {"attributes": None}}, {"t": {"attributes": []}}]
)
def test_tables_of_4_x_and_broken_ones_have_no_attributes(table: dict[str, Any]) -> None:
    assert _rules().of_topic("t", table).ttl == "forever"


def test_a_real_broker_s_topic_table(real_store: Callable[[str], Path]) -> None:
    table = read_broker_state(real_store("H") / "store").topics
    with_attributes = [name for name, config in table.items() if config["attributes"]]
    assert with_attributes
    name = with_attributes[0]
    assert _rules().of_topic(name, table).ttl == "forever"
    table[name]["attributes"]["reserve.time"] = "48"  # type: ignore[index]
    rules = _rules(key_compaction__from_broker=False)
    assert (
        rules.of_topic(name, table).ttl_ms == 48 * HOUR_MS and not rules.of_topic(name, table).key_compaction
    )
    keyed = _rules().of_topic(name, table)
    assert (keyed.ttl, keyed.ttl_from, keyed.key_compaction) == ("forever", "key compaction", True)
    ruled = _rules(topics__rules=[{"pattern": name, "ttl": "1d"}]).of_topic(name, table)
    assert (ruled.ttl, ruled.key_compaction) == ("1d", True)
    off = _rules(topics__rules=[{"pattern": "*", "key_compaction": "off"}]).of_topic(name, table)
    assert (off.ttl, off.key_compaction) == ("2d", False)


@pytest.mark.parametrize(
    ("ttl", "setting", "hours"),
    [("12h", "", 12), ("30d", "", 72), ("forever", "", 72), ("30d", "1h", 1), ("1h", "5d", 120)],
)
def test_messages_stay_for_a_time_after_their_upload(ttl: str, setting: str, hours: int) -> None:
    rule = _rules(retention__ttl=ttl, retention__min_archived=setting).of_topic("t")
    assert rule.min_archived_ms == hours * HOUR_MS


def test_durations() -> None:
    for text, milliseconds in (
        ("12h", 12 * HOUR_MS),
        (" 7D ", 7 * DAY_MS),
        ("1.5h", 90 * 60_000),
        ("forever", None),
    ):
        assert duration_ms(text) == milliseconds
        assert duration_ms(written_duration(milliseconds)) == milliseconds
    for text in ("", "7", "-1d", "0h", "never", "1x", "40000d", "0.1ms"):
        with pytest.raises(BadValueError):
            duration_ms(text)


OWNER = ("retention.ttl=7d", 'topics.rules=[{"pattern": "audit*", "ttl": "forever"}]', "gc.grace_ms=10d")


def loaded(*assignments: str) -> LoadedSettings:
    return load_settings(flags=flag_assignments(list(assignments)))


def archive(*assignments: str) -> dict[str, Any]:
    """The settings of an archive, as they come back from a commit."""
    return {RULES: json.loads(json.dumps(rules_document(loaded(*assignments).settings)))}


def test_a_command_without_settings_uses_the_rules_of_the_owner() -> None:
    owner, found = loaded(*OWNER).settings, with_rules_in_force(loaded(), archive(*OWNER))
    assert (found.retention, found.topics.rules, found.gc) == (owner.retention, owner.topics.rules, owner.gc)


def test_without_committed_rules_a_command_uses_its_own() -> None:
    assert with_rules_in_force(loaded(*OWNER), {}) == loaded(*OWNER).settings


def test_the_same_settings_are_no_difference() -> None:
    own = loaded(*OWNER)
    assert differences(own, archive(*OWNER)) == []
    assert with_rules_in_force(own, archive(*OWNER)) == own.settings


def test_a_setting_that_differs_is_refused_with_both_values() -> None:
    with pytest.raises(UsageError) as raised:
        with_rules_in_force(loaded("retention.ttl=1d", "topics.rules=[]"), archive(*OWNER))
    said = str(raised.value)
    assert "retention.ttl is 1d (--set retention.ttl), and 7d in the archive" in said
    assert "topics.rules is [] (--set topics.rules), and [pattern=audit* ttl=forever] in the archive" in said
    assert "--rules FILE" in said


def test_a_rules_file_counts_instead(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[retention]\nttl = "1d"\n[[topics.rules]]\npattern = "x"\nttl = "2d"\n')
    found = with_rules_in_force(loaded("fetch.memory_bytes=2GiB"), archive(*OWNER), str(file))
    assert found.retention.ttl == "1d" and [one.pattern for one in found.topics.rules] == ["x"]
    assert found.fetch.memory_bytes == 2 << 30


def test_grace_periods_are_the_owners_unless_they_are_given() -> None:
    assert grace_in_force(loaded(), archive(*OWNER)).grace_ms == 10 * 86_400_000
    assert grace_in_force(loaded("gc.grace_ms=0"), archive(*OWNER)).grace_ms == 0


@pytest.mark.parametrize("document", [[], "text", {"retention.ttl": 7}, {"gc.grace_ms": "soon"}])
def test_rules_that_do_not_parse_are_damage(document: object) -> None:
    with pytest.raises(CorruptionError, match="do not parse"):
        with_rules_in_force(loaded(), {RULES: document})


def test_rules_of_a_later_version_are_ignored() -> None:
    document = archive(*OWNER)[RULES] | {"retention.by_size": "1TiB"}
    assert with_rules_in_force(loaded(), {RULES: document}).retention.ttl == "7d"
