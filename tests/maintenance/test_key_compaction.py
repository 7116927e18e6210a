"""Key compaction: the latest message of each key stays, as a dict of all messages says, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocketmq_tiered.maintenance.key_rounds import KeyedQueue, keyed_queues
from tests.faults.crashing_store import CrashError, CrashingStore
from tests.fetcher.reading_fakes import plain_fetcher
from tests.maintenance.compaction_scene import EVERYTHING
from tests.maintenance.keyed_scene import KEYED, OTHER, Table, pull
from tests.sweeps import examples, sweep
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.model.tables import RunKind


def test_the_latest_message_of_each_key_stays(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.write(60)
    before = table.check()
    (queue,) = keyed_queues(
        RunIndex(table.store),
        load(table.store),
        lambda topic: topic == "keyed",
        before_version=EVERYTHING,
        runs_max=1 << 20,
    )
    assert isinstance(queue, KeyedQueue)
    dry = table.compact(apply=False)
    assert not dry.is_applied and table.check() == before
    done = table.compact()
    assert done.figures == dry.figures and done.rounds == 1
    found = table.check()
    latest = {key: at for at, (key, _) in enumerate(table.sent[: queue.cut]) if key}
    kept = {at for at in latest.values() if table.sent[at][1]}
    assert set(found) == kept | set(range(queue.cut, len(table.sent)))
    assert (done.figures.messages, done.figures.new_messages) == (queue.cut, len(kept))
    assert done.figures.tombstones == len(latest) - len(kept)
    assert table.compact().rounds == 0, "nothing is new"
    state = load(table.store)
    row = state.queue(KEYED)
    assert row is not None and int(row["min_queue_offset"]) == 0
    assert pull(plain_fetcher(table.store), 0).min_offset == min(found)
    other = {row.offset for row in table.owner.truth[OTHER].rows}
    assert len(other) == int(state.queue(OTHER)["row_count"])  # type: ignore[index]


def test_messages_without_a_key_may_stay(tmp_path: Path) -> None:
    table = Table(tmp_path)
    own = replace(table.settings.key_compaction, keyless="keep")
    table.settings = replace(table.settings, key_compaction=own)
    table.write(60)
    table.compact()
    found = table.check()
    assert {at for at, (key, _) in enumerate(table.sent) if not key} <= set(found)


def test_outputs_are_as_large_as_what_stays(tmp_path: Path) -> None:
    table = Table(tmp_path)
    compaction = replace(table.settings.compaction, object_bytes=6_000)
    table.settings = replace(table.settings, compaction=compaction)
    table.write(60, keys=20)
    done = table.compact()
    assert done.figures.bytes > 5 * 6_000 and done.figures.new_bytes < 6_000
    runs = RunIndex(table.store).runs_of(load(table.store), KEYED).runs
    assert (runs["kind"] == RunKind.SPARSE).sum() <= 2
    table.check()


def test_a_queue_of_deleted_keys_keeps_a_row(tmp_path: Path) -> None:
    """A run has rows: where nothing stays, the last message does."""
    table = Table(tmp_path)
    table.write(30, tombstones=1.0)
    table.write(2, tombstones=0.0)
    table.compact()
    table.check()


@settings(max_examples=examples(5), deadline=None)
@example(seed=0, acts=[*["write"] * 5, "compact", "expire", "join"])  # a hole behind a plain run
@given(
    st.integers(0, 10**6),
    st.lists(
        st.sampled_from(["write", "compact", "join", "collect", "expire", "cut_log", "restart"]), max_size=12
    ),
)
def test_any_interleaving_gives_the_dict(
    tmp_path_factory: pytest.TempPathFactory, seed: int, acts: list[str]
) -> None:
    table = Table(tmp_path_factory.mktemp("spool"), seed)
    table.write(20)
    for act in [*acts, "compact", "collect"]:
        if act == "write":
            table.write(table.random.randint(1, 15), keys=table.random.choice([2, 12, 60]))
        else:
            getattr(table, act)()
        table.check()


@pytest.mark.parametrize("every", sweep([9, 25], fast=[25]))
@pytest.mark.parametrize("after_effect", [False, True])
def test_a_kill_at_any_request_leaves_an_archive_that_the_next_pass_finishes(
    tmp_path: Path, *, after_effect: bool, every: int
) -> None:
    step, done = 1, False
    while not done:
        table = Table(tmp_path)
        table.write(25)
        try:
            table.compact(CrashingStore(table.store, step, after_effect=after_effect))  # type: ignore[arg-type]
            done = True
        except CrashError:
            table.check()
        table.compact()
        found = table.check()
        table.collect()
        assert table.check() == found
        step += every
    kinds = RunIndex(table.store).runs_of(load(table.store), KEYED).runs["kind"].tolist()
    assert RunKind.SPARSE in kinds
