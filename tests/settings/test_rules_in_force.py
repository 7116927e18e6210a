"""Rules in force: what the owner has committed counts for every command, and a different setting is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiered.errors import CorruptionError, UsageError
from tiered.settings.load import LoadedSettings, flag_assignments, load_settings
from tiered.settings.rules_in_force import (
    RULES,
    differences,
    grace_in_force,
    rules_document,
    with_rules_in_force,
)

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
    with pytest.raises(CorruptionError, match="rules do not parse"):
        with_rules_in_force(loaded(), {RULES: document})


def test_rules_of_a_later_version_are_ignored() -> None:
    document = archive(*OWNER)[RULES] | {"retention.by_size": "1TiB"}
    assert with_rules_in_force(loaded(), {RULES: document}).retention.ttl == "7d"
