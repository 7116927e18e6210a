"""Messages as lines, with bodies in the requested form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rocketmq_tiered.cli.rendering import BodyForm, is_charset, jsonl_line
from tests.kernels.record_builder import Message, encode, properties
from tiered.model.queue import QueueKey

QUEUE = QueueKey("t", 3, 0)


def shown(body: bytes, form: str | None) -> dict[str, Any]:
    """A message with ``body``, as printed and parsed again."""
    line = jsonl_line(encode(_message(body), 4096), QUEUE, 7, body_form=BodyForm(form))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    document: dict[str, Any] = json.loads(line)
    return document


def _message(body: bytes) -> Message:
    return Message(topic=b"t", queue_id=3, queue_offset=7, body=body, properties=properties((b"TAGS", b"a")))


@pytest.mark.parametrize("form", [None, "text", "hex", "json"])
def test_a_body_that_its_producer_did_not_compress_as_it_says_is_null(
    form: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    record = encode(Message(topic=b"t", queue_id=3, queue_offset=7, body=b"plain", sys_flag=0x1), 4096)
    document = json.loads(jsonl_line(record, QUEUE, 7, body_form=BodyForm(form) if form else None))
    assert (document["bodyLen"], document["bodySha256"], document["wireBodyLen"]) == (None, None, 5)
    assert document.get("body") is None and ("body" in document) is (form is not None)
    assert "t queue 3 offset 7: body cannot be decompressed" in caplog.text


def test_an_inner_batch_that_does_not_decode_is_null(caplog: pytest.LogCaptureFixture) -> None:
    record = encode(Message(topic=b"t", queue_id=3, queue_offset=7, body=b"no batch", sys_flag=0x80), 4096)
    document = json.loads(jsonl_line(record, QUEUE, 7, body_form=BodyForm("text")))
    assert (document["inner"], document["bodyLen"], document["body"]) == (None, 8, "no batch")
    assert "offset 7: body cannot be decompressed" in caplog.text


@pytest.mark.parametrize(
    ("body", "form", "expected"),
    [
        ("größer\n".encode(), "text", "größer\n"),
        (b"a\xffb", "text", "a\ufffdb"),
        (b"\x00\xff", "hex", "00ff"),
        (b"", "hex", ""),
        (b'{"a":\r\n [1, 2.5, null]}\n', "json", {"a": [1, 2.5, None]}),
        (b"not JSON", "json", None),
        (b"\xff", "json", None),
        (b"", "json", None),
    ],
)
def test_bodies(body: bytes, form: str, expected: object) -> None:
    assert shown(body, form)["body"] == expected


@pytest.mark.parametrize(
    "body",
    [b"123456789012345678901234567890", b'{"price": 0.12345678901234567890123, "id": 18446744073709551616}'],
)
def test_numbers_of_a_json_body_keep_all_their_digits(body: bytes) -> None:
    assert body in jsonl_line(encode(_message(body), 4096), QUEUE, 7, body_form=BodyForm("json"))


def test_bodies_that_are_not_of_the_charset_are_counted() -> None:
    chinese = "订单".encode("gbk")
    form, gbk = BodyForm("text"), BodyForm("text", "GBK")
    assert (form(b"abc"), form(chinese), form(chinese)) == (
        "abc",
        "\ufffd\ufffd\ufffd\ufffd",
        "\ufffd\ufffd\ufffd\ufffd",
    )
    assert form.replaced == 2
    assert gbk(chinese) == "订单" and gbk.replaced == 0
    assert BodyForm("hex")(chinese) == chinese.hex()


@pytest.mark.parametrize(
    ("name", "is_one"), [("UTF-8", True), ("gbk", True), ("rot13", False), ("hex", False), ("x", False)]
)
def test_only_charsets_decode_text(name: str, is_one: bool) -> None:
    assert is_charset(name) is is_one
