"""Messages as lines: what `tiered cat` and `tiered query` print of one.

Owns the forms. Field names are those of tiered.formats.fields; `body` (and `inner[].body`) is there on request only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from tiered.formats.record import decode_record, inner_messages, record_to_json
from tiered.model.queue import QueueKey

logger = logging.getLogger(__name__)


def jsonl_line(
    data: bytes | memoryview,
    queue: QueueKey,
    queue_offset: int,
    *,
    is_own_offset: bool = False,
    body_form: str | None = None,
) -> bytes:
    """One message as one line. Raises CorruptionError for a record that does not decode. A body that does not is null:
    its producer may have made it so, and it must not hide the messages behind it."""
    record = decode_record(data)
    document = record_to_json(
        record, queue=queue, queue_offset=queue_offset, is_own_offset=is_own_offset, must_decode=False
    )
    complain_of_body(document)
    if body_form is not None:
        form = _FORMS[body_form]
        document["body"] = None if document["bodyLen"] is None else form(record.body())
        inner = document.get("inner") or ()
        for shown, item in zip(inner, inner_messages(record) if inner else (), strict=True):
            shown["body"] = form(item.body)
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def complain_of_body(document: Mapping[str, Any]) -> None:
    """Say so where the body, or the inner batch in it, is shown as null."""
    if document["bodyLen"] is None or document.get("inner", ()) is None:
        logger.warning(
            "%s queue %d offset %d: the body does not decode as its sysFlag %d says",
            document["topic"], document["queueId"], document["queueOffset"], document["sysFlag"],
        )  # fmt: skip


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


def _json(body: bytes) -> Any:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    # As it was written: a number of twenty digits would come out of a float as another one. Line breaks, which are
    # never inside of strings, would end the line.
    return orjson.Fragment(body.replace(b"\n", b" ").replace(b"\r", b" "))


_FORMS: Mapping[str, Callable[[bytes], Any]] = {"text": _text, "hex": bytes.hex, "json": _json}

BODY_FORMS = tuple(_FORMS)
"""``text``: UTF-8, what is none as U+FFFD. ``hex``: every byte. ``json``: the value as written, null for no JSON."""
