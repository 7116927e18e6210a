"""Where a pull is answered from: the full table of policies and places, fall-backs, and one line of offsets.

Tag expressions and codes as a broker and its clients have them.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.policy.read_policy import (
    BrokerSide,
    HeldOffsets,
    NextStep,
    PullResult,
    ReadPolicies,
    ReadPolicy,
    ReadSource,
    Residency,
    Situation,
    after_local,
    after_tiered,
    decide_read,
    join_offsets,
)
from fetcher.rows.pull import PullStatus
from fetcher.rows.tag_filter import EXPRESSION_CHARS_MAX, TAGS_MAX, TagFilter, tag_filter, tags_code
from tests.kernels.record_builder import Message, encode, properties
from tiered.errors import UsageError
from tiered.formats.record import java_hash
from tiered.settings.load import load_settings
from tiered.settings.sections import Settings

ARCHIVED, LOCAL = HeldOffsets(0, 100), HeldOffsets(50, 150)
BOTH = Situation(60, archived=ARCHIVED, local=LOCAL, is_local_record=True)
TIERED, HERE, HOLD, ASK = ReadSource.TIERED, ReadSource.LOCAL, ReadSource.RETRY, ReadSource.CHECK_MEMORY

PLACES: dict[str, tuple[Situation, tuple[ReadSource, ReadSource, ReadSource, ReadSource]]] = {
    # where the message is                     DISABLE  NOT_IN_DISK  NOT_IN_MEM  FORCE
    "in both, memory not asked": (BOTH, (HERE, HERE, ASK, TIERED)),
    "in both, in memory": (replace(BOTH, residency=Residency.RESIDENT), (HERE, HERE, HERE, TIERED)),
    "in both, on disk": (replace(BOTH, residency=Residency.COLD), (HERE, HERE, TIERED, TIERED)),
    "in both, residency unknown": (replace(BOTH, residency=Residency.UNKNOWN), (HERE, HERE, HERE, TIERED)),
    "archived, broker deleted it": (
        Situation(10, archived=ARCHIVED, local=LOCAL),
        (HERE, TIERED, TIERED, TIERED),
    ),
    "archived, broker's queue is gone": (Situation(10, archived=ARCHIVED), (HERE, TIERED, TIERED, TIERED)),
    "archived, broker's log is empty": (
        Situation(60, archived=ARCHIVED, local=HeldOffsets(100, 100)),
        (HERE, TIERED, TIERED, TIERED),
    ),
    "below what both have": (
        Situation(5, archived=HeldOffsets(10, 100), local=LOCAL),
        (HERE, TIERED, TIERED, TIERED),
    ),
    "not archived yet": (
        Situation(120, archived=ARCHIVED, local=LOCAL, is_local_record=True),
        (HERE, HERE, HERE, TIERED),
    ),
    "at the archive's end": (
        Situation(100, archived=ARCHIVED, local=LOCAL, is_local_record=True),
        (HERE, HERE, HERE, TIERED),
    ),
    "at the end of the queue": (Situation(150, archived=ARCHIVED, local=LOCAL), (HERE, HERE, HERE, TIERED)),
    "beyond the end": (Situation(999, archived=ARCHIVED, local=LOCAL), (HERE, HERE, HERE, TIERED)),
    "deleted before it was archived": (
        Situation(120, archived=ARCHIVED, local=HeldOffsets(130, 150)),
        (HERE, HOLD, HOLD, TIERED),
    ),
    "deleted, but still pinned": (
        Situation(120, archived=ARCHIVED, local=HeldOffsets(130, 150), is_local_record=True),
        (HERE, HERE, HERE, TIERED),
    ),
    "queue not archived": (Situation(60, local=LOCAL, is_local_record=True), (HERE, HERE, HERE, HERE)),
    "queue not archived, deleted": (Situation(10, local=LOCAL), (HERE, HERE, HERE, HERE)),
    "queue not archived yet, deleted": (
        Situation(10, local=LOCAL, is_archive_behind=True),
        (HERE, HOLD, HOLD, HOLD),
    ),
    "unknown queue": (Situation(0), (HERE, HERE, HERE, HERE)),
    "a topic of the broker's own": (replace(BOTH, is_system=True), (HERE, HERE, HERE, HERE)),
    "archived, broker's files hidden": (
        Situation(60, archived=ARCHIVED, broker=BrokerSide.UNREADABLE),
        (HOLD, TIERED, TIERED, TIERED),
    ),
    "not archived, broker's files hidden": (
        Situation(120, archived=ARCHIVED, broker=BrokerSide.UNREADABLE),
        (HOLD, HOLD, HOLD, TIERED),
    ),
    "queue not archived, broker's files hidden": (
        Situation(0, broker=BrokerSide.UNREADABLE),
        (HOLD, HOLD, HOLD, TIERED),
    ),
    "broker's own topic, broker's files hidden": (
        Situation(60, is_system=True, archived=ARCHIVED, broker=BrokerSide.UNREADABLE),
        (HOLD, HOLD, HOLD, HOLD),
    ),
    "in both, about to leave the broker": (
        replace(BOTH, is_expiring=True),
        (HERE, TIERED, TIERED, TIERED),
    ),
    "not archived, about to leave the broker": (
        Situation(120, archived=ARCHIVED, local=LOCAL, is_local_record=True, is_expiring=True),
        (HERE, HERE, HERE, TIERED),
    ),
    "archived, broker does not tell": (
        Situation(60, archived=ARCHIVED, broker=BrokerSide.UNREPORTED),
        (HERE, TIERED, TIERED, TIERED),
    ),
    "not archived, broker does not tell": (
        Situation(120, archived=ARCHIVED, broker=BrokerSide.UNREPORTED),
        (HERE, HERE, HERE, TIERED),
    ),
}


@pytest.mark.parametrize("policy", ReadPolicy)
@pytest.mark.parametrize("place", PLACES)
def test_the_whole_table(place: str, policy: ReadPolicy) -> None:
    situation, sources = PLACES[place]
    decision = decide_read(policy, situation)
    assert decision.source is sources[list(ReadPolicy).index(policy)] and decision.why


# -- fall-backs -----------------------------------------------------------------------------------------------

S = PullStatus
FORCED_BEYOND = Situation(120, archived=ARCHIVED, local=LOCAL, is_local_record=True)


@pytest.mark.parametrize(
    ("status", "situation", "follow"),
    [
        (S.FOUND, BOTH, NextStep.KEEP),
        (S.NO_MATCHED_MESSAGE, BOTH, NextStep.KEEP),
        (S.OFFSET_FOUND_NULL, BOTH, NextStep.LOCAL),
        (S.NO_MATCHED_LOGIC_QUEUE, BOTH, NextStep.LOCAL),
        (None, BOTH, NextStep.LOCAL),
        (None, replace(BOTH, is_local_record=False), NextStep.KEEP),
        (S.OFFSET_TOO_SMALL, BOTH, NextStep.LOCAL),
        (S.OFFSET_TOO_SMALL, Situation(5, archived=HeldOffsets(10, 100), local=LOCAL), NextStep.KEEP),
        (
            S.OFFSET_TOO_SMALL,
            Situation(5, archived=HeldOffsets(10, 100), broker=BrokerSide.AWAY),
            NextStep.RETRY,
        ),
        (
            S.OFFSET_TOO_SMALL,
            Situation(5, archived=HeldOffsets(10, 100), broker=BrokerSide.UNREPORTED),
            NextStep.LOCAL,
        ),
        (
            S.OFFSET_TOO_SMALL,
            Situation(5, archived=HeldOffsets(10, 100), broker=BrokerSide.UNREADABLE),
            NextStep.RETRY,
        ),
        (
            S.OFFSET_TOO_SMALL,
            Situation(5, archived=HeldOffsets(10, 100), broker=BrokerSide.UNREADABLE, is_broker_older=False),
            NextStep.KEEP,
        ),
        (S.OFFSET_OVERFLOW_BADLY, FORCED_BEYOND, NextStep.LOCAL),
        (
            S.OFFSET_OVERFLOW_ONE,
            replace(FORCED_BEYOND, offset=100, local=HeldOffsets(100, 150)),
            NextStep.LOCAL,
        ),
        (S.OFFSET_OVERFLOW_BADLY, Situation(150, archived=ARCHIVED, local=LOCAL), NextStep.LOCAL),
        (
            S.OFFSET_OVERFLOW_BADLY,
            Situation(120, archived=ARCHIVED, local=HeldOffsets(130, 150)),
            NextStep.RETRY,
        ),
        (
            S.OFFSET_OVERFLOW_BADLY,
            Situation(120, archived=ARCHIVED, broker=BrokerSide.UNREADABLE),
            NextStep.RETRY,
        ),
        (S.OFFSET_OVERFLOW_BADLY, Situation(120, archived=ARCHIVED), NextStep.KEEP),
        (
            S.OFFSET_OVERFLOW_BADLY,
            Situation(120, archived=ARCHIVED, broker=BrokerSide.UNREPORTED),
            NextStep.LOCAL,
        ),
    ],
)
def test_after_the_archive_has_answered(status: S | None, situation: Situation, follow: NextStep) -> None:
    assert after_tiered(status, situation) is follow


@pytest.mark.parametrize(
    ("policy", "status", "situation", "follow"),
    [
        (ReadPolicy.NOT_IN_DISK, S.FOUND, BOTH, NextStep.KEEP),
        (ReadPolicy.NOT_IN_DISK, None, BOTH, NextStep.TIERED),
        (ReadPolicy.NOT_IN_DISK, S.OFFSET_TOO_SMALL, BOTH, NextStep.TIERED),
        (ReadPolicy.NOT_IN_DISK, None, replace(BOTH, offset=120), NextStep.RETRY),
        (ReadPolicy.NOT_IN_DISK, S.OFFSET_TOO_SMALL, replace(BOTH, offset=120), NextStep.RETRY),
        (ReadPolicy.NOT_IN_DISK, S.OFFSET_TOO_SMALL, Situation(10, local=LOCAL), NextStep.KEEP),
        (ReadPolicy.NOT_IN_DISK, None, Situation(60, local=LOCAL), NextStep.RETRY),
        (ReadPolicy.DISABLE, None, BOTH, NextStep.RETRY),
        (ReadPolicy.DISABLE, S.OFFSET_TOO_SMALL, Situation(10, local=LOCAL), NextStep.KEEP),
        (ReadPolicy.FORCE, None, replace(BOTH, is_system=True), NextStep.RETRY),
        (ReadPolicy.FORCE, S.OFFSET_OVERFLOW_ONE, replace(BOTH, offset=150), NextStep.KEEP),
        (ReadPolicy.NOT_IN_DISK, S.OFFSET_OVERFLOW_BADLY, BOTH, NextStep.TIERED),
        (ReadPolicy.NOT_IN_DISK, S.OFFSET_OVERFLOW_ONE, BOTH, NextStep.TIERED),
        (ReadPolicy.NOT_IN_DISK, S.NO_MATCHED_LOGIC_QUEUE, BOTH, NextStep.TIERED),
        (ReadPolicy.DISABLE, S.OFFSET_OVERFLOW_BADLY, replace(BOTH, archived=None), NextStep.KEEP),
    ],
)
def test_after_the_broker_s_files_have_answered(
    policy: ReadPolicy, status: S | None, situation: Situation, follow: NextStep
) -> None:
    assert after_local(policy, status, situation) is follow


# -- one line -------------------------------------------------------------------------------------------------


def _answer(offset: int, queue: HeldOffsets | None) -> PullResult:
    """What a side says of ``offset``, a whole queue read at once."""
    if queue is None:
        return PullResult(S.NO_MATCHED_LOGIC_QUEUE, offset, 0, 0)
    low, high = queue.min_offset, queue.max_offset
    if high <= 0:
        return PullResult(S.NO_MESSAGE_IN_QUEUE, offset, low, high)
    if offset < low:
        return PullResult(S.OFFSET_TOO_SMALL, low, low, high)
    if offset >= high:
        return PullResult(
            S.OFFSET_OVERFLOW_ONE if offset == high else S.OFFSET_OVERFLOW_BADLY, high, low, high
        )
    return PullResult(S.FOUND, high, low, high)


def _pull(policy: ReadPolicy, situation: Situation, local: HeldOffsets | None = None) -> PullResult | None:
    """A pull as PolicyReader makes it, with both sides as they are said to be, or the broker as it is now: ``local``;
    None: held."""
    local = local or situation.local
    decision = decide_read(policy, situation)
    if decision.source is ReadSource.CHECK_MEMORY:
        decision = decide_read(policy, replace(situation, residency=Residency.COLD))
    source, tried = decision.source, set()
    while source in (ReadSource.LOCAL, ReadSource.TIERED) and source not in tried:
        tried.add(source)
        if source is ReadSource.TIERED:
            line = _answer(situation.offset, situation.archived)
            follow = after_tiered(line.status, situation)
        else:
            line = _answer(situation.offset, local)
            if line.status is S.OFFSET_TOO_SMALL and local is situation.local and situation.is_local_record:
                line = PullResult(S.FOUND, situation.offset + 1, line.min_offset, line.max_offset)
            follow = after_local(policy, line.status, situation)
        if follow is NextStep.KEEP:
            return join_offsets(line, source, situation)
        source = {
            NextStep.LOCAL: ReadSource.LOCAL,
            NextStep.TIERED: ReadSource.TIERED,
            NextStep.RETRY: ReadSource.RETRY,
        }[follow]
    return None


RANGES = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: HeldOffsets(min(pair), max(pair))),
)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """A queue whose archive and broker may overlap, touch, or leave a hole."""
    offset, archived = draw(st.integers(0, 35)), draw(RANGES)
    broker = draw(st.sampled_from([BrokerSide.READABLE] * 4 + [BrokerSide.UNREADABLE, BrokerSide.AWAY]))
    local = draw(RANGES) if broker is BrokerSide.READABLE else None
    is_record = local is not None and offset in local
    behind = draw(st.booleans()) and archived is None
    older = draw(st.booleans())
    return Situation(offset, False, archived, broker, local, is_record, behind, is_broker_older=older)


@given(st.sampled_from([ReadPolicy.NOT_IN_DISK, ReadPolicy.NOT_IN_MEM, ReadPolicy.FORCE]), situations())
def test_no_pull_passes_a_message_that_exists_nor_goes_back_within_the_queue(
    policy: ReadPolicy, situation: Situation
) -> None:
    line = _pull(policy, situation)
    offset = situation.offset
    sides = [side for side in (situation.archived, situation.local) if side is not None]
    if line is None:
        # BufferedRows: no reachable side has it, and it may still come.
        assert not any(offset in side for side in sides)
        return
    if any(offset in side for side in sides):
        assert line.status is S.FOUND
    if line.status is S.OFFSET_TOO_SMALL:
        assert line.next_offset > offset, "moved, or the pull would repeat for ever"
    if line.status is not S.FOUND:
        passed = range(offset, line.next_offset)
        assert not any(number in side for side in sides for number in passed)
    ends = [side.max_offset for side in sides]
    if line.next_offset < offset:
        # Only from beyond the end of everything, and only when the broker shows all it has.
        assert line.status is S.OFFSET_OVERFLOW_BADLY and line.next_offset == max(ends) < offset
        assert situation.broker not in (BrokerSide.UNREADABLE, BrokerSide.AWAY)
    may_have_it = situation.broker is BrokerSide.UNREADABLE and situation.is_broker_older
    if situation.broker is BrokerSide.AWAY or may_have_it:
        assert line.next_offset == offset or line.status is S.FOUND, "it may have what is passed"


@given(
    st.sampled_from([ReadPolicy.NOT_IN_DISK, ReadPolicy.NOT_IN_MEM, ReadPolicy.FORCE]),
    situations(),
    st.data(),
)
def test_a_broker_that_was_cut_back_since_the_look_moves_no_consumer_past_the_archive(
    policy: ReadPolicy, situation: Situation, data: st.DataObject
) -> None:
    archived, known = situation.archived, situation.local
    if known is None or archived is None:
        return
    end = data.draw(st.integers(known.min_offset, known.max_offset))
    line = _pull(policy, situation, HeldOffsets(known.min_offset, end))
    offset = situation.offset
    if line is None:
        assert offset not in archived
    elif offset in archived:
        assert line.status is S.FOUND
    elif line.status is not S.FOUND:
        assert not any(number in archived for number in range(offset, line.next_offset))


@given(situations())
def test_what_the_broker_deleted_before_it_was_archived_is_held(situation: Situation) -> None:
    archived, local = situation.archived, situation.local
    if archived is None or local is None or not archived.max_offset <= situation.offset < local.min_offset:
        return
    for policy in (ReadPolicy.NOT_IN_DISK, ReadPolicy.NOT_IN_MEM, ReadPolicy.FORCE):
        assert _pull(policy, situation) is None


@given(st.sampled_from(ReadPolicy), situations())
def test_following_next_offsets_ends_at_the_end(policy: ReadPolicy, situation: Situation) -> None:
    """No cycle between the archive's end and the broker's (a duplicate pull loop)."""
    seen: list[int] = []
    offset = situation.offset
    for _ in range(20):
        local = situation.local
        situation = replace(situation, offset=offset, is_local_record=local is not None and offset in local)
        line = _pull(policy, situation)
        if line is None or line.next_offset == offset:
            break
        assert line.next_offset not in seen
        seen.append(offset)
        offset = line.next_offset
    else:
        pytest.fail(f"never ends: {seen}")


@given(situations())
def test_the_maximum_of_an_archive_s_answer_is_not_raised(situation: Situation) -> None:
    if situation.archived is None or situation.offset not in situation.archived:
        return
    line = _pull(ReadPolicy.FORCE, situation)
    assert line is not None and line.max_offset == situation.archived.max_offset
    if situation.local is not None and situation.local.max_offset > situation.local.min_offset:
        assert line.min_offset == min(situation.archived.min_offset, situation.local.min_offset)


# -- settings -------------------------------------------------------------------------------------------------


def test_policies_by_topic() -> None:
    loaded = load_settings(
        flags={
            "read.policy": ("--set", "not_in_mem"),
            "topics.rules": (
                "--set",
                '[{"pattern": "orders-*", "read_policy": "FORCE"}, {"pattern": "*-hot", "read_policy": 0},'
                ' {"pattern": "kept", "ttl": "7d"}, {"pattern": "%RETRY%g", "read_policy": "1"}]',
            ),
        }
    )
    policies = ReadPolicies.of(loaded.settings)
    assert policies.of_topic("x") is ReadPolicy.NOT_IN_MEM
    assert policies.of_topic("orders-hot") is ReadPolicy.FORCE
    assert policies.of_topic("news-hot") is ReadPolicy.DISABLE
    assert policies.of_topic("%RETRY%g") is ReadPolicy.NOT_IN_DISK
    assert policies.of_topic("kept") is ReadPolicy.NOT_IN_MEM, "its rule has no read policy"
    assert ReadPolicies.of(Settings()).of_topic("x") is ReadPolicy.NOT_IN_DISK


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("read.policy", "4"),
        ("read.policy", ""),
        ("topics.rules", '[{"pattern": "a", "read_policy": "b"}]'),
        ("topics.rules", '[{"pattern": "a", "read_policy": 4}]'),
    ],
)
def test_an_unknown_policy_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{key}.*DISABLE, NOT_IN_DISK, NOT_IN_MEM, FORCE"):
        load_settings(flags={key: ("--set", value)})


@given(tag=st.text(max_size=20))
def test_the_code_is_javas_hash(tag: str) -> None:
    assert tags_code(tag) == java_hash(tag)


def test_known_codes() -> None:
    assert tags_code("TagA") == 2598919
    assert tags_code("Aa") == tags_code("BB") == 2112
    assert tags_code("") == 0


@pytest.mark.parametrize("expression", [None, "", "*"])
def test_everything(expression: str | None) -> None:
    assert tag_filter(expression) is None


@pytest.mark.parametrize(
    ("expression", "tags"),
    [("a", {"a"}), ("a||b", {"a", "b"}), (" a ||  b || ", {"a", "b"}), ("a|b", {"a|b"}), ("a || a", {"a"})],
)
def test_expressions(expression: str, tags: set[str]) -> None:
    found = tag_filter(expression)
    assert found is not None and found.tags == tags


def test_an_expression_without_a_tag_is_an_error() -> None:
    with pytest.raises(UsageError, match="has no tag"):
        tag_filter(" || ")


@pytest.mark.parametrize("expression", ["a" * (EXPRESSION_CHARS_MAX + 1), "a||" * TAGS_MAX])
def test_an_expression_that_takes_long_is_an_error(expression: str) -> None:
    with pytest.raises(UsageError, match="filter has"):
        tag_filter(expression)


@pytest.mark.parametrize("tags", [["Aa"], ["Aa", "x"]])
def test_columns_first_then_the_tag_itself(tags: list[str]) -> None:
    wanted = TagFilter(tags)
    codes = np.array([tags_code("Aa"), tags_code("BB"), tags_code("y"), 0])
    assert wanted.tags_mask(codes).tolist() == [True, True, False, False]

    def record(*pairs: tuple[bytes, bytes]) -> memoryview:
        message = Message(
            topic=b"t", queue_id=0, queue_offset=0, body=b"TAGS\x01Aa", properties=properties(*pairs)
        )
        return memoryview(encode(message, 0))

    assert wanted.keep(record((b"TAGS", b"Aa")))
    assert not wanted.keep(record((b"TAGS", b"BB")))
    assert not wanted.keep(record((b"KEYS", b"TAGS"), (b"XTAGS", b"Aa")))
    assert not wanted.keep(record())
