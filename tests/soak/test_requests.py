"""100,000 changed requests for each kind of access rules: none reaches a topic that its account lacks."""

from pathlib import Path

import pytest

from tests.server.request_fuzz import RULES, allowed, reached

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("rules", RULES)
def test_no_request_reaches_a_topic_that_its_account_lacks(tmp_path: Path, rules: str) -> None:
    count, topics = reached(tmp_path, rules, seed=62, count=100_000, now_ms=1_800_000_000_000)
    assert count > 5_000 and topics["own"] > 5_000
    assert [topic for topic in topics if not allowed(topic, rules)] == []
