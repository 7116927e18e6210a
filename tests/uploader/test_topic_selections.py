"""A selection of topics that changes: excluded topics are reported, and explains the gaps that it causes."""

from dataclasses import replace
from pathlib import Path

import pytest

from fetcher.queries.queue_listing import GapListing, list_queues
from tests.end_to_end.offloading import FILTER, backfill, state_of
from tests.uploader.small_broker import SmallBroker
from tiered.catalog.state import CatalogState
from tiered.model.queue import TopicFilter
from tiered.object_store.memory import MemoryStore
from uploader.offload_status import outcome_text
from uploader.topic_selections import SELECTIONS, SELECTIONS_MAX, TopicSelections

NO_AUDIT = replace(FILTER, exclude=("audit*",))


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore("memory://selections")


@pytest.fixture
def broker(tmp_path: Path) -> SmallBroker:
    made = SmallBroker(tmp_path / "store")
    made.send(50)
    made.send(50, "audit")
    return made


def gaps(memory: MemoryStore, topic: str) -> tuple[GapListing, ...]:
    (found,) = [queue.gaps for queue in list_queues(state_of(memory), hidden=True) if queue.topic == topic]
    return found


def test_a_topic_that_is_excluded_is_named(broker: SmallBroker, memory: MemoryStore) -> None:
    result = backfill(broker.path, memory, topic_filter=NO_AUDIT)
    assert result.excluded == ("audit",)
    assert outcome_text(result).endswith("excluded by topics.include and topics.exclude: audit")


def test_a_topic_included_later_is_reported_as_not_archived(broker: SmallBroker, memory: MemoryStore) -> None:
    backfill(broker.path, memory, topic_filter=NO_AUDIT)
    again = backfill(broker.path, memory)
    assert again.messages == 0 and again.excluded_before == ("audit",)
    assert "NOT archived, because an earlier start excluded them: audit" in outcome_text(again)
    assert backfill(broker.path, memory, topic_filter=NO_AUDIT).excluded_before == ()


def test_a_gap_of_excluded_messages_has_that_reason(broker: SmallBroker, memory: MemoryStore) -> None:
    backfill(broker.path, memory)
    for topics in (NO_AUDIT, NO_AUDIT, FILTER, FILTER):
        broker.send(50)
        broker.send(50, "audit")
        backfill(broker.path, memory, topic_filter=topics)
    assert gaps(memory, "audit") == (GapListing(50, 150, "excluded"),)
    assert gaps(memory, "orders") == ()
    assert len(state_of(memory).settings[SELECTIONS]) == 3


def test_selections_are_bounded_and_recorded_once() -> None:
    state = CatalogState()
    for number in range(3 * SELECTIONS_MAX):
        selections = TopicSelections.at(state, TopicFilter(exclude=(f"t{number % 2}",)), 100 * number)
        state = replace(state, settings={**state.settings, **selections.setting(state)})
        assert selections.setting(state) == {}
    assert len(selections.entries) == SELECTIONS_MAX
    last = 100 * (3 * SELECTIONS_MAX - 1)
    assert selections.excluded("t1", last, last + 1) and not selections.excluded("t0", last, last + 1)
    assert selections.excluded("t0", last - 1, last + 1) and not selections.excluded("orders", 0, last + 1)


def test_a_start_that_archived_nothing_leaves_no_selection() -> None:
    state = CatalogState(settings={SELECTIONS: [[0, ["*"], [], False], [500, ["*"], ["audit"], False]]})
    assert not TopicSelections.at(state, TopicFilter(), 500).excluded("audit", 0, 1_000)
    assert TopicSelections.at(state, TopicFilter(), 600).excluded("audit", 0, 1_000)
