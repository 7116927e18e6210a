"""Messages as lines: what `tiered cat` and `tiered query` print of one.

Owns the forms. Field names are those of tiered.formats.fields; `body` (and `inner[].body`) is there on request only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from tiered.formats.record import decode_record, inner_messages, record_to_json
from tiered.model.queue import QueueKey


def jsonl_line(
    data: bytes | memoryview,
    queue: QueueKey,
    queue_offset: int,
    *,
    is_own_offset: bool = False,
    body_form: str | None = None,
) -> bytes:
    """One message as one line. Raises CorruptionError for a record or body that does not decode."""
    record = decode_record(data)
    document = record_to_json(record, queue=queue, queue_offset=queue_offset, is_own_offset=is_own_offset)
    if body_form is not None:
        form = _FORMS[body_form]
        document["body"] = form(record.body())
        for shown, item in zip(document.get("inner", ()), inner_messages(record), strict=True):
            shown["body"] = form(item.body)
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


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
