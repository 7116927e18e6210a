"""Commits, roots and their bytes: what goes in comes out, damage is a typed error, speed follows the content."""

import time
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.catalog.drafts import append_draft, at, claim_draft, queue
from tests.sweeps import examples
from tiered.catalog.apply import apply
from tiered.catalog.commit import (
    COMMIT_KIND,
    Commit,
    CommitDraft,
    CommitKind,
    CommitPlace,
    PageChange,
    decode_commit,
    decode_root,
    describe,
    encode_commit,
    encode_root,
)
from tiered.catalog.deletions import DeletionChange, DeletionList, Reason
from tiered.catalog.index_refs import IndexChange, IndexRef
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, LogCheck, Owner, PageRef, RootRef
from tiered.catalog.timer_refs import TimerRef
from tiered.errors import CorruptionError, UnsupportedFormatError
from tiered.formats.container import Container, decode_container, encode_container
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE

A, B = queue("a"), queue("ü %RETRY% b", -1, 3)
INDEX = IndexRef(
    "index/0000000000001-0000000000002-3_x.idx", 1, 2, 5, 1, 2, 0, 9, 7, 0, (3, 4, 1, 0), 2, 999, 100
)
LIST = DeletionList("pages/deletions", Reason.EXPIRED, 2, 3, 4, 5, 6)
PLACE = CommitPlace(7, 3, "n-before", "w1", "c", "b", RootRef("pages/root", 4), RootRef("pages/kept", 2))


def encoded(container: Container) -> bytes:
    """A commit's container from its parts."""
    return encode_container(COMMIT_KIND, container.header, container.tables, is_packed=True)


def full_draft() -> CommitDraft:
    made = append_draft(CatalogState(epoch=3), {A: 2, B: 3}, objects=2, gap={A: 4})
    page = PageRef("pages/p", 1, 2, 5, 9, 100, A, B, 0, 0, 0, 0)
    return replace(
        made,
        kind=CommitKind.MAINTENANCE,
        removed=np.array([(1, 2, 3, 4, 5, 6)], REMOVED_DTYPE),
        hide=[A],
        unhide=[B],
        state_objects={"topics": "state/t-3-1-x"},
        settings={"ttl": {"a": 5}},
        pending_deletions=["x"],
        restored=["y"],
        purged=["z"],
        reason=Reason.EXPIRED,
        floors=np.array([(1, 2, 3)], FLOOR_DTYPE),
        deletions=DeletionChange([LIST], [LIST], ["pages/deletions-x"]),
        owner=Owner("w1", "run", "h", 5, False),
        common_version=2,
        pages=PageChange(RootRef("pages/r", 6), 5, [page], ["pages/o"], 3),
        index=IndexChange([INDEX], ["index/old"]),
        timers=(TimerRef(4, 7, 5, 9, 3, 1, 2, 80, 40),),
    )


def same(one: Commit, other: Commit) -> bool:
    if one.place != other.place or one.put_id != other.put_id:
        return False
    for field in fields(CommitDraft):
        a, b = getattr(one.draft, field.name), getattr(other.draft, field.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        elif (list(a) if isinstance(a, tuple | list) else a) != (
            list(b) if isinstance(b, tuple | list) else b
        ):
            return False
    return True


def test_every_field_of_a_commit_survives_its_bytes() -> None:
    default = CommitDraft(CommitKind.APPEND)
    draft = full_draft()
    for field in fields(CommitDraft):
        given_value = getattr(draft, field.name)
        if field.name not in ("history", "from_phys"):
            is_default = given_value is getattr(default, field.name)
            assert not is_default, f"{field.name} is not tested"
    made, data = encode_commit(draft, PLACE, "nonce")
    assert same(decode_commit(data, source="x"), made)


def test_a_put_id_is_per_content_and_writer() -> None:
    draft = full_draft()
    put_id = encode_commit(draft, PLACE, "n")[0].put_id
    assert encode_commit(full_draft(), PLACE, "n")[0].put_id == put_id
    others = [
        encode_commit(draft, PLACE, "m"),
        encode_commit(replace(draft, to_phys=1), PLACE, "n"),
        encode_commit(replace(draft, check=LogCheck(0, 0, 1)), PLACE, "n"),
        encode_commit(draft, replace(PLACE, version=8), "n"),
        encode_commit(draft, replace(PLACE, predecessor_put_id="o"), "n"),
    ]
    runs = draft.runs.copy()
    runs["end_phys"][0] += 1
    others.append(encode_commit(replace(draft, runs=runs), PLACE, "n"))
    assert len({commit.put_id for commit, _ in others} | {put_id}) == 7


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_damage_is_a_corruption_error(data: st.DataObject) -> None:
    _, encoded = encode_commit(full_draft(), PLACE, "n")
    damaged = bytearray(encoded)
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    else:
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        read = decode_commit(bytes(damaged), source="catalog/1")
    except (CorruptionError, UnsupportedFormatError) as error:
        assert "catalog/1" in str(error)
    else:
        assert same(read, encode_commit(full_draft(), PLACE, "n")[0])


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("runs", "queue"),
        ("runs", "object"),
        ("gaps", "queue"),
        ("objects", "key"),
        ("removed", "queue"),
        ("floors", "queue"),
    ],
)
def test_an_index_outside_its_table_is_a_corruption_error(table: str, column: str) -> None:
    _, data = encode_commit(full_draft(), PLACE, "n")
    container = decode_container(data, COMMIT_KIND, source="x")
    container.tables[table][column][0] = 99
    with pytest.raises(CorruptionError, match=f"{table}.{column}"):
        decode_commit(encoded(container), source="x")


@pytest.mark.parametrize("name", ["kind", "version", "check", "pages", "owner"])
def test_a_header_that_lacks_something_is_a_corruption_error(name: str) -> None:
    _, data = encode_commit(full_draft(), PLACE, "n")
    container = decode_container(data, COMMIT_KIND, source="x")
    for wrong in (None, [7]):
        header = dict(container.header)
        if wrong is None:
            del header[name]
        else:
            header[name] = wrong
        with pytest.raises(CorruptionError, match="this commit of the catalog is damaged"):
            decode_commit(encoded(replace(container, header=header)), source="x")


def test_columns_of_a_newer_minor_format_are_ignored() -> None:
    made, data = encode_commit(full_draft(), PLACE, "n")
    container = decode_container(data, COMMIT_KIND, source="x")
    runs = container.tables["runs"]
    wider = np.zeros(len(runs), [*runs.dtype.descr, ("invented", "<i8")])
    for name in runs.dtype.names or ():
        wider[name] = runs[name]
    container.tables["runs"] = wider
    container.header["invented"] = True
    assert same(
        decode_commit(encoded(container), source="x"),
        made,
    )


def test_a_root_is_the_whole_state() -> None:
    state = apply(CatalogState(), at(CatalogState(), claim_draft()))
    for number in range(5):
        keys = {QueueKey(f"t{(number + step) % 4}", 0, 0): 2 for step in range(3)}
        state = apply(
            state,
            at(
                state,
                append_draft(state, keys, gap=dict.fromkeys(keys, number % 2 * 3) if number > 2 else {}),
            ),
        )
    marks = CommitDraft(
        CommitKind.MAINTENANCE,
        hide=[QueueKey("t1", 0, 0)],
        pending_deletions=["sets/00/a-1-9.sso"],
        state_objects={"topics": "state/t-1-1-x"},
        settings={"ttl": 3},
    )
    state = apply(state, at(state, marks))
    data = encode_root(state)
    assert describe(decode_root(data, source="x")) == describe(state)
    assert encode_root(decode_root(data, source="x")) == data
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 4
        with pytest.raises((CorruptionError, UnsupportedFormatError), match="pages/x"):
            decode_root(bytes(damaged), source="pages/x")


def test_ten_thousand_runs_are_committed_without_objects_per_run() -> None:
    """Measured 15-25 ms on one core; the bound here only catches a loop that came back."""
    state = apply(CatalogState(), at(CatalogState(), claim_draft()))
    keys = {QueueKey(f"topic-{number // 8:05d}", number % 8, 0): 3 for number in range(10_000)}
    state = apply(state, at(state, append_draft(state, keys)))
    best_s = 9.0
    for _ in range(3):
        draft = append_draft(state, keys)
        place = CommitPlace(state.version + 1, state.epoch, state.put_id, "w1", "c", "b", state.root)
        started_s = time.perf_counter()
        commit, _ = encode_commit(draft, place, "n")
        state = apply(state, commit)
        best_s = min(best_s, time.perf_counter() - started_s)
    assert best_s < 0.15


def test_a_commit_without_data_does_not_copy_the_queues() -> None:
    state = apply(CatalogState(), at(CatalogState(), claim_draft()))
    state = apply(state, at(state, append_draft(state, {A: 1})))
    for draft in (
        append_draft(state, {}),
        CommitDraft(CommitKind.MAINTENANCE, pending_deletions=["x"]),
        claim_draft(),
    ):
        assert apply(state, at(state, draft)).table is state.table


@pytest.mark.parametrize(
    ("change", "name"),
    [("kind", "runs of kind 7"), ("commit", "kind unheard_of"), ("quarantine", "table quarantine")],
)
def test_what_is_reserved_is_refused_by_name(change: str, name: str) -> None:
    _, data = encode_commit(full_draft(), PLACE, "n")
    container = decode_container(data, COMMIT_KIND, source="x")
    if change == "kind":
        container.tables["runs"]["kind"][1] = 7
    elif change == "commit":
        container.header["kind"] = "unheard_of"
    else:
        container.tables[change] = np.zeros(1, [("hour", "<i8")])
    with pytest.raises(
        UnsupportedFormatError,
        match=f"x: this object of the catalog has {name}, which this program",
    ):
        decode_commit(encoded(container), source="x")


def test_reserved_tables_may_be_empty() -> None:
    made, data = encode_commit(full_draft(), PLACE, "n")
    container = decode_container(data, COMMIT_KIND, source="x")
    container.tables["quarantine"] = np.zeros(0, [("hour", "<i8")])
    assert same(decode_commit(encoded(container), source="x"), made)
