"""The fastjson dialect: what the broker really writes, and what no dialect allows."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.formats.fastjson import FastjsonError, loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{0:17,1:18}", {"0": 17, "1": 18}),
        ('{"offsetTable":{\n\t\t1:60,2:25 , 3 :12\n\t}\n}', {"offsetTable": {"1": 60, "2": 25, "3": 12}}),
        ('{"t@g":{0:10018,1:7972\n\t\t},"u@g":{}}', {"t@g": {"0": 10018, "1": 7972}, "u@g": {}}),
        ('{"a":"{0:1}, 2:3","b":{4:5}}', {"a": "{0:1}, 2:3", "b": {"4": 5}}),
        ('{{"queueId":0}:{"brokerOffset":4}}', {'{"queueId":0}': {"brokerOffset": 4}}),
        ("{'a':'it\\'s',b:[1,2,],}", {"a": "it's", "b": [1, 2]}),
        ('{1:"\\x41\\v"}', {"1": "A\v"}),
        ('{1:"\\ud83d\\ude00"}', {"1": "\U0001f600"}),
        ("{-1:-2.5e3,}", {"-1": -2500.0}),
        ("{1:2L}", {"1": 2}),
        ("{a:undefined,b:true} // end", {"a": None, "b": True}),
        ('{"a":1,"a":2}', {"a": 2}),
        (b"[1,,2]", [1, 2]),
        ("{9223372036854775808:18446744073709551616}", {"9223372036854775808": 18446744073709551616}),
    ],
)
def test_reads_what_fastjson_writes(text: str | bytes, value: Any) -> None:
    assert loads(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{1",
        "{1:",
        '{"a":tru}',
        '{"a":"',
        '{"a":"\\q"}',
        "{1:2}x",
        "{1 2}",
        "[1 2]",
        "{1:2x}",
        '"\\u00g0"',
        "{:1}",
        "{[}",
    ],
)
def test_refuses_what_is_not_json_and_says_where(text: str) -> None:
    with pytest.raises(FastjsonError, match=r"invalid JSON at character \d+") as caught:
        loads(text)
    assert 0 <= caught.value.position <= len(text) + 1


def test_refuses_bytes_that_are_not_utf8() -> None:
    with pytest.raises(FastjsonError, match="character 6"):
        loads(b'{"a":"\xff"}')


def test_nesting_is_bounded() -> None:
    with pytest.raises(FastjsonError, match="nested too deeply"):
        loads("[" * 100_000 + "1," * 2)


@given(VALUES)
def test_strict_json_reads_as_ever(value: Any) -> None:
    assert loads(json.dumps(value)) == value


@given(VALUES)
def test_unquoted_keys_change_nothing_else(value: Any) -> None:
    text = json.dumps(value)
    assert loads(f"{{7:{text},'s':[]}}") == {"7": value, "s": []}
    assert loads(f"{{7:{text}}}") == {"7": value}


@given(st.text(alphabet="{}[]:,'\"\\ux01ab \n", max_size=30))
def test_any_text_gives_a_value_or_a_typed_error(text: str) -> None:
    try:
        loads(text)
    except FastjsonError as error:
        assert error.exit_code == 1


def test_objects_as_keys_within_keys_are_refused_as_each_would_double_the_one_before() -> None:
    with pytest.raises(FastjsonError, match="inside of another key"):
        loads("{" * 60 + '"a":1' + "}:1" * 59 + "}")  # 2^60 backslashes otherwise
    assert loads('{{"a":1}:{{"b":2}:3}}') == {'{"a":1}': {'{"b":2}': 3}}


@pytest.mark.parametrize(
    "text",
    [
        "{" + '\\"' * 200_000,
        '{1:"' + '\\"' * 200_000,
        '{1:"' + '\\"' * 200_000 + "\\",
        "{1:" + '"a\\' * 200_000,
        "{" + "1 " * 200_000,
        "{1" + " " * 400_000,
        "{" + "/*" * 200_000,
        "{1:" + "-" * 400_000,
        "{'" * 150_000,
        "{" + "," * 400_000,
    ],
)
def test_what_is_no_json_is_found_out_in_time_proportional_to_its_length(text: str) -> None:
    begun_s = time.process_time()
    with pytest.raises(FastjsonError):
        loads(text)
    assert time.process_time() - begun_s < 2.0  # minutes, if a search starts at every character


def test_the_dialect_may_be_bounded_where_strict_json_is_not() -> None:
    assert loads(json.dumps(["x" * 100]), dialect_max=10) == ["x" * 100]
    assert loads("{1:22222}", dialect_max=9) == {"1": 22222}
    with pytest.raises(FastjsonError, match=r"not standard JSON, and .* texts of up to 9 characters"):
        loads("{1:222222}", dialect_max=9)
