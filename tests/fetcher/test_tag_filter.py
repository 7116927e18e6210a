"""Tag expressions and codes as a broker and its clients have them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.rows.tag_filter import EXPRESSION_CHARS_MAX, TAGS_MAX, TagFilter, tag_filter, tags_code
from tests.kernels.record_builder import Message, encode, properties
from tiered.errors import UsageError
from tiered.formats.record import java_hash


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
