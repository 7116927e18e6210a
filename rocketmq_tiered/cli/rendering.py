"""Formats messages as JSON lines for `tiered cat` and `tiered query`.

Field names are those of tiered.formats.fields; `body` and `inner[].body` are optional.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from tiered.console import escaped_json
from tiered.formats.record import decode_record, inner_messages, record_to_json
from tiered.model.queue import QueueKey

logger = logging.getLogger(__name__)


def jsonl_line(
    data: bytes | memoryview,
    queue: QueueKey,
    queue_offset: int,
    *,
    is_own_offset: bool = False,
    body_form: BodyForm | None = None,
) -> bytes:
    """The message of a record as one JSON line, with its body if ``body_form`` is given. Raises CorruptionError for an
    undecodable record; an undecodable body is null, as a producer may have sent it so. ``is_own_offset``:
    ``queue_offset`` is in the record, not only in the index of its queue (a batch)."""
    record = decode_record(data)
    document = record_to_json(record, queue=queue, queue_offset=queue_offset, is_own_offset=is_own_offset)
    warn_of_body(document)
    if body_form is not None:
        document["body"] = None if document["bodyLen"] is None else body_form(record.body())
        inner = document.get("inner") or ()
        for shown, item in zip(inner, inner_messages(record) if inner else (), strict=True):
            shown["body"] = body_form(item.body)
    return escaped_json(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))


def warn_of_body(document: Mapping[str, Any]) -> None:
    """Log a warning if the body of a message in ``document``, or the batch of messages inside it, is null, because it
    could not be decompressed."""
    if document["bodyLen"] is None or document.get("inner", ()) is None:
        logger.warning(
            "%s queue %d offset %d: the body cannot be decompressed as sysFlag %d says; it is printed as null",
            document["topic"],
            document["queueId"],
            document["queueOffset"],
            document["sysFlag"],
        )


def _json(body: bytes) -> Any:
    """The body as a part of a JSON line, with its numbers and names as they were written; None if it is no JSON."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    # The original text: a float would change a number of twenty digits. Line breaks, never inside strings, would end
    # the line.
    return orjson.Fragment(body.replace(b"\n", b" ").replace(b"\r", b" "))


class BodyForm:
    """How bodies are shown. ``text``: decoded, invalid bytes as U+FFFD, which ``replaced`` counts by body. ``hex``: all
    bytes. ``json``: the value as written, null if invalid."""

    def __init__(self, form: str, charset: str = "UTF-8") -> None:
        self._form, self.charset = form, charset
        self.replaced = 0
        """Bodies with bytes that are not of the charset."""

    def __call__(self, body: bytes) -> Any:
        """``body`` in the chosen form, as a value of a JSON document."""
        if self._form == "hex":
            return body.hex()
        if self._form == "json":
            return _json(body)
        try:
            return body.decode(self.charset)
        except UnicodeError:
            self.replaced += 1
            return body.decode(self.charset, "replace")


BODY_FORMS = ("text", "hex", "json")


def is_charset(name: str) -> bool:
    """Whether ``name`` is a character set from which text can be decoded here."""
    try:
        return isinstance(b"a".decode(name), str)
    except (LookupError, UnicodeError, ValueError):
        return False
