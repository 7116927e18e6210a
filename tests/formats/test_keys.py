"""Names and keys: every name has one escape, no two share one, and every key says what it was built from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import UsageError
from tiered.formats.keys import (
    archive_prefix,
    catalog_key,
    data_key,
    epoch_of,
    escape,
    index_key,
    page_key,
    page_version,
    parse_catalog_key,
    parse_data_key,
    parse_set_key,
    set_key,
    state_key,
    unescape,
)
from tiered.model.queue import QueueKey
from tiered.object_store.key import check_key

NAMES = st.one_of(st.text(max_size=80), st.text("%|._-aZ09/~", max_size=300))
SMALL = st.integers(0, (1 << 31) - 1)


@given(NAMES)
def test_an_escape_is_one_legal_component(name: str) -> None:
    escaped = escape(name)
    assert check_key(escaped) == escaped
    assert len(escaped) < 255
    assert "/" not in escaped


@given(NAMES)
def test_an_escape_can_be_read_back_unless_it_was_cut(name: str) -> None:
    assert unescape(escape(name)) in ({name} if len(escape(name)) <= 200 else {None})


@given(NAMES, NAMES)
def test_no_two_names_share_an_escape(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("plain-Topic_1", "plain-Topic_1"),
        ("%RETRY%group", ".25RETRY.25group"),
        (".", ".2e"),
        ("..", ".2e.2e"),
        ("", ".-"),
        ("a/b", "a.2fb"),
        ("日", ".e6.97.a5"),
    ],
)
def test_escapes_are_these(name: str, escaped: str) -> None:
    assert (escape(name), unescape(escaped)) == (escaped, name)


@pytest.mark.parametrize("text", ["a.b", "a.2", "a.2E", ".61", "a/b", "%", "a.", "."])
def test_what_is_no_escape_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        unescape(text)


def test_long_names_keep_apart_beyond_the_cut() -> None:
    first, second = "%" * 255, "%" * 254 + "a"
    assert escape(first)[:199] == escape(second)[:199]
    assert escape(first) != escape(second)


@given(NAMES, SMALL, SMALL, st.integers(0, (1 << 63) - 1), SMALL, st.integers(0, 1 << 60))
def test_a_data_key_says_what_it_names(
    topic: str, queue_id: int, generation: int, base: int, epoch: int, attempt: int
) -> None:
    found = parse_data_key(check_key(data_key(QueueKey(topic, queue_id, generation), base, epoch, attempt)))
    assert found is not None
    assert found.topic in (topic, None)
    assert found[1:] == (queue_id, generation, base, epoch, attempt)


def test_the_worst_name_fits_keys_and_file_systems() -> None:
    worst = "\U0001f600" * 63 + "%%%"
    key = data_key(QueueKey(worst, -(1 << 31), (1 << 32) - 1), (1 << 63) - 1, 1 << 32, 1 << 63)
    full = f"some/prefix/{archive_prefix(worst, worst)}/{key}"
    assert len(full) < 1024
    assert max(map(len, full.split("/"))) < 255
    assert parse_data_key(key) is not None


def test_segments_of_a_queue_list_in_order_of_their_offsets() -> None:
    queue = QueueKey("topic", 3, 0)
    bases = [0, 9, 10, 99, 1 << 40]
    keys = [data_key(queue, base, 1, 1) for base in bases]
    assert keys == sorted(keys)
    assert len({key.rsplit("/", 1)[0] for key in keys}) == 1


def test_set_keys() -> None:
    key = set_key("00000000000000001024", 3, 17)
    assert check_key(key).endswith("/00000000000000001024-3-17.sso")
    assert parse_set_key(key) == ("00000000000000001024", 3, 17)
    assert parse_data_key(key) is None
    assert parse_set_key("sets/aa/x.sso") is None
    with pytest.raises(UsageError):
        set_key("a-b", 1, 1)


@given(st.integers(0, 10**16 - 1), st.integers(0, 10**16 - 1))
def test_newer_commits_list_first(one: int, other: int) -> None:
    assert (catalog_key(one) < catalog_key(other)) == (one > other)
    assert parse_catalog_key(check_key(catalog_key(one))) == one


def test_other_keys_are_legal_and_hold_their_digest() -> None:
    assert check_key(page_key("root", 64, 3, "0af3")).startswith("pages/")
    assert check_key(index_key(1_700_000_000_000, 1_700_000_100_000, 4, "7f")).endswith("-4_7f.idx")
    assert check_key(state_key("topics", 3, 9, "abcdef")).endswith("-abcdef")
    assert parse_catalog_key("catalog/12") is None


@pytest.mark.parametrize(
    "key",
    [
        "catalog/00000000000000000000",
        "pages/root-99999999999999999999-1-a",
        "timer/00000000000000000001-" + "9" * 20,
    ],
)
def test_a_name_with_a_number_that_no_archive_reaches_is_not_ours(key: str) -> None:
    assert parse_catalog_key(key) is None
    assert page_version(key) is None
    assert epoch_of(key) is None
