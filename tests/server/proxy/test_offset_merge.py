"""What a broker's answers mean, and that no walk along the line passes a message that archive or broker has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.policy.read_policy import (
    HeldOffsets,
)
from fetcher.rows.pull import PullResult, PullStatus
from rocketmq_tiered.server.proxy.offset_merge import (
    BrokerReply,
    interpret,
    joined_min,
    lower_by_time,
    reply_code,
)
from tests.kernels.record_builder import Message, encode, properties

S = PullStatus


def body(*offsets: int) -> memoryview:
    return memoryview(b"".join(encode(Message(b"t", 0, number, b"b"), 1000 * number) for number in offsets))


def said(code: int, next_offset: int, data: memoryview | None = None, **fields: object) -> BrokerReply:
    values = {"remark": "", "min_offset": 0, "max_offset": 100} | fields
    return BrokerReply(code, next_offset=next_offset, body=body() if data is None else data, **values)  # type: ignore[arg-type]


# -- a broker's words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "has_all", "status", "next_offset", "records"),
    [
        (said(0, 12, body(10, 11)), True, S.FOUND, 12, 2),
        (said(0, 15, body(10, 14)), True, S.FOUND, 11, 1),
        (said(0, 15, body(13, 14)), True, S.OFFSET_TOO_SMALL, 13, 0),
        (said(0, 15, body(13, 14)), False, S.FOUND, 15, 2),
        (said(0, 15, body(10, 11)), True, S.FOUND, 12, 2),
        (said(0, 15, body(10, 11)), False, S.FOUND, 15, 2),
        (said(0, 11, body(8)), True, S.FOUND, 11, 1),
        (said(0, 62, body(10, 11), offset_delta=50), True, S.FOUND, 62, 2),
        (said(20, 12), False, S.NO_MATCHED_MESSAGE, 12, 0),
        (said(20, 12, remark="MESSAGE_WAS_REMOVING"), True, S.OFFSET_TOO_SMALL, 12, 0),
        (said(20, 10), True, S.NO_MATCHED_MESSAGE, 10, 0),
        (said(19, 10), True, S.OFFSET_OVERFLOW_ONE, 10, 0),
        (said(19, 10, max_offset=0), True, S.NO_MESSAGE_IN_QUEUE, 10, 0),
        (said(19, 300_000, remark="OFFSET_FOUND_NULL"), False, S.OFFSET_TOO_SMALL, 300_000, 0),
        (said(21, 40), False, S.OFFSET_TOO_SMALL, 40, 0),
        (said(21, 5), False, S.OFFSET_OVERFLOW_BADLY, 5, 0),
        (said(21, 0, max_offset=0), False, S.NO_MATCHED_LOGIC_QUEUE, 0, 0),
        (said(21, 5, remark="OFFSET_RESET"), False, S.NO_MATCHED_MESSAGE, 5, 0),
        (said(21, 50, remark="OFFSET_RESET"), True, S.NO_MATCHED_MESSAGE, 50, 0),
    ],
)
def test_what_answers_mean(
    answer: BrokerReply, has_all: bool, status: PullStatus, next_offset: int, records: int
) -> None:
    offset = 60 if answer.offset_delta else 10
    found = interpret(answer, offset, has_all=has_all)
    assert (found.status, found.next_offset) == (status, next_offset)
    expected = body(*[10, 11, 14][:records] if records == 2 and next_offset == 12 else ())
    assert b"".join(found.body) == expected or records


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 40))
def test_what_is_believed_has_no_hole(kept: set[int], offset: int) -> None:
    """A broker that lost all but ``kept`` answers what it still finds, as if nothing had been there before."""
    found = sorted(number for number in kept if number >= offset)[:8]
    answer = said(0, found[-1] + 1, body(*found)) if found else said(20, 41)
    meant: PullResult = interpret(answer, offset, has_all=True)
    if meant.status is S.FOUND:
        passed = range(offset, meant.next_offset)
        assert set(passed) <= kept and b"".join(meant.body) == body(*passed)
    else:
        assert meant.status is S.OFFSET_TOO_SMALL and offset not in kept


def batches(*spans: tuple[int, int]) -> memoryview:
    """Records of ``(base offset, messages)``: inner batches as a broker stores them, single sends between."""
    found = []
    for base, count in spans:
        inner = properties((b"INNER_BASE", b"%d" % base), (b"INNER_NUM", b"%d" % count))
        batch = Message(b"t", 0, base, b"b", inner, sys_flag=0xC0)
        found.append(encode(batch if count > 1 else Message(b"t", 0, base, b"b"), 1000 * base))
    return memoryview(b"".join(found))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_what_is_believed_has_no_hole_between_batches(counts: list[int], data: st.DataObject) -> None:
    """As of single messages: the broker has lost some of a queue's records, and looked at more than it found."""
    spans, end = [], 0
    for count in counts:
        spans.append((end, count))
        end += count
    offset = data.draw(st.integers(0, end - 1))
    looked_at = [span for span in spans if span[0] + span[1] > offset][: data.draw(st.integers(1, 12))]
    kept = [span for span in looked_at if data.draw(st.booleans())]
    after = sum(looked_at[-1])
    meant = interpret(said(0 if kept else 20, after, batches(*kept)), offset, has_all=True)
    whole = 0
    while whole < len(kept) and kept[whole] == looked_at[whole]:
        whole += 1
    if whole == 0:
        assert meant.status is S.OFFSET_TOO_SMALL
    else:
        assert (meant.status, meant.next_offset) == (S.FOUND, sum(kept[whole - 1]))
        assert b"".join(meant.body) == batches(*kept[:whole])


@given(st.binary(max_size=200), st.integers(0, 9))
def test_bytes_that_are_no_records_are_no_error(data: bytes, offset: int) -> None:
    assert interpret(said(0, 9, memoryview(data)), offset, has_all=True).status in (
        S.FOUND,
        S.OFFSET_TOO_SMALL,
    )


@pytest.mark.parametrize(
    ("status", "push", "pull_api"),
    [
        (S.FOUND, 0, 0),
        (S.OFFSET_TOO_SMALL, 20, 21),
        (S.OFFSET_OVERFLOW_BADLY, None, 21),
        (S.OFFSET_OVERFLOW_ONE, None, None),
        (S.OFFSET_FOUND_NULL, None, None),
    ],
)
def test_codes(status: PullStatus, push: int | None, pull_api: int | None) -> None:
    assert reply_code(status, is_pull_api=False) == push
    assert reply_code(status, is_pull_api=True) == pull_api
    assert (
        reply_code(status, is_pull_api=True, broker_code=21, broker_status=S.NO_MATCHED_LOGIC_QUEUE)
        == pull_api
    )
    assert reply_code(status, is_pull_api=False, broker_code=19, broker_status=status) == 19, (
        "the archive changed nothing"
    )
    unproven = reply_code(status, is_pull_api=False, broker_code=0, broker_status=status)
    assert unproven == push, "messages that are not passed on are not found"


def test_offsets_by_time_in_the_joined_queue() -> None:
    archived = HeldOffsets(0, 300)
    assert lower_by_time(120, archived, 250, HeldOffsets(250, 400)) == 120
    assert lower_by_time(300, archived, 330, HeldOffsets(250, 400)) == 330
    assert lower_by_time(300, archived, 250, HeldOffsets(250, 400)) == 300
    assert lower_by_time(300, archived, 370, HeldOffsets(350, 400)) == 300, "300 to 349 may be it"
    assert lower_by_time(300, archived, 0, None) == 300
    assert (joined_min(archived, 100), joined_min(archived, -1), joined_min(None, 7)) == (0, 0, 7)
    assert joined_min(HeldOffsets(50, 50), 7) == 7
