"""Renders the search for messages and the messages found, with properties and body. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import gather, run_sync
from fetcher.queries.by_key import KeyKind
from fetcher.queries.source import newest_ms
from fetcher.queries.time_search import Boundary
from fetcher.rows.message import Message
from fetcher.rows.pull import PullRequest, PullStatus
from fetcher.walk import messages_of
from rocketmq_tiered.page.html import (
    Child,
    Html,
    bytes_text,
    count_text,
    date_text,
    facts,
    lines,
    section,
    table,
    tag,
)
from tiered.console import counted
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.model.queue import QueueKey
from tiered.timestamps import parse_instant, wall_ms

MESSAGES_MAX = 20
MESSAGES_BYTES_MAX = 8 << 20
QUEUES_MAX = 64
KEY_RANGE_MS = 7 * 86_400_000
"""As `tiered query`: before the newest message, unless the whole archive is searched."""
FORMS = ("key", "id", "time", "offset")
GROUP = "admin page"
STEPS_MAX = 64
_OFFSET_MSG_ID = re.compile(r"[0-9A-Fa-f]{32}(?:[0-9A-Fa-f]{24})?")


@dataclass(frozen=True)
class Search:
    """The fields of a form. ``queue_id`` and ``generation`` None: all, and the newest."""

    form: str = "key"
    topic: str = ""
    value: str = ""
    queue_id: int | None = None
    generation: int | None = None
    is_whole: bool = False

    @property
    def is_given(self) -> bool:
        """Whether there is something to search for."""
        return bool(self.value)


def parse_search(query: Mapping[str, str]) -> Search:
    """The search of a form's fields. Raises UsageError."""
    form = query.get("by", "key")
    if form not in FORMS:
        raise UsageError(f"cannot search by {form}", hint=f"use one of {', '.join(FORMS)}")
    found = Search(
        form,
        query.get("topic", ""),
        query.get("value", "").strip(),
        _number(query, "queue"),
        _number(query, "generation"),
        query.get("whole") == "1",
    )
    if found.is_given and form != "id" and not found.topic:
        raise UsageError(f"a search by {form} needs a topic", hint="choose one")
    return found


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,19}", text):
        raise UsageError(f"{name} {text} is not a number", hint="count from 0")
    return int(text)


def find_messages(access: ArchiveAccess, search: Search) -> list[Message]:
    """At most MESSAGES_MAX messages: by key the newest first, by time the oldest first. Raises NotFoundError without
    any, UsageError for a wrong search, or what reading raises."""
    if search.form == "key":
        found = _by_key(access, search, KeyKind.ANY)
    elif search.form == "id":
        found = _by_id(access, search)
    elif search.form == "time":
        found = _by_time(access, search, parse_instant(search.value))
    else:
        found = _by_offset(access, search)
    if not found:
        raise NotFoundError(*_not_found(search))
    return found


def _not_found(search: Search) -> tuple[str]:
    where = f" in {search.topic}" if search.topic else ""
    words = {
        "key": "with key",
        "id": "with id",
        "time": "stored at or after",
        "offset": "at offset",
    }[search.form]
    days = KEY_RANGE_MS // 86_400_000
    hint = f": the newest {days} days were searched" if search.form == "key" and not search.is_whole else ""
    return (f"the archive has no message {words} {search.value}{where}{hint}",)


def _by_key(access: ArchiveAccess, search: Search, kind: KeyKind) -> list[Message]:
    since = None
    if kind is KeyKind.ANY and not search.is_whole:
        # A message from the future (flipped bit, wrong clock) must not hide all others.
        newest = min(newest_ms(access.state), wall_ms())
        since = max(0, newest - KEY_RANGE_MS)
    finding = access.find_by_key(
        search.topic, search.value, kind, since, None, MESSAGES_MAX, MESSAGES_BYTES_MAX
    )
    found = run_sync(access.while_open(finding))
    return [one for one in found if search.queue_id in (None, one.queue_id)]


def _by_id(access: ArchiveAccess, search: Search) -> list[Message]:
    """Messages with an id of the broker (offsetMsgId) or of the producer's client (UNIQ_KEY): both may look alike."""
    is_broker_id = _OFFSET_MSG_ID.fullmatch(search.value) is not None
    if is_broker_id:
        found = run_sync(access.while_open(access.find_by_id(search.value)))
        if found is not None and search.topic in ("", found.topic):
            return [found]
    if search.topic:
        return _by_key(access, search, KeyKind.UNIQUE)
    if is_broker_id:
        return []
    raise UsageError("an id of a client needs a topic", hint="choose one")


def _by_time(access: ArchiveAccess, search: Search, time_ms: int) -> list[Message]:
    queues = [
        queue.key
        for queue in access.queues(search.topic, hidden=False)
        if search.queue_id in (None, queue.queue_id)
    ]
    if len(queues) > QUEUES_MAX:
        raise UsageError(f"{search.topic} has {len(queues):,} queues", hint="choose one queue")

    async def first(queue: QueueKey) -> list[Message]:
        offset = await access.offset_by_time(queue, time_ms, Boundary.LOWER)
        return await _from(access, queue, offset, MESSAGES_MAX)

    async def all_of() -> list[list[Message]]:
        return await gather([first(queue) for queue in queues])

    found = [message for part in run_sync(access.while_open(all_of())) for message in part]
    late = [message for message in found if message.store_timestamp >= time_ms]
    return sorted(late, key=lambda one: (one.store_timestamp, one.queue, one.queue_offset))[:MESSAGES_MAX]


def _by_offset(access: ArchiveAccess, search: Search) -> list[Message]:
    if search.queue_id is None:
        raise UsageError("a search by offset needs a queue", hint="choose one")
    offset = _number({"offset": search.value}, "offset")
    assert offset is not None
    queue = access.queue_key(search.topic, search.queue_id, search.generation)
    found = run_sync(access.while_open(_from(access, queue, offset, 1)))
    return [one for one in found if one.queue_offset <= offset < one.queue_offset + max(1, one.inner_num)]


async def _from(access: ArchiveAccess, queue: QueueKey, offset: int, count: int) -> list[Message]:
    """The next messages of ``queue``, behind gaps too."""
    size = MESSAGES_BYTES_MAX // (8 if count > 1 else 1)
    request = PullRequest(
        queue.topic, queue.queue_id, offset, count, size, GROUP, generation=queue.generation
    )
    for _ in range(STEPS_MAX):
        result = await access.fetcher.pull(request)
        if result.status is PullStatus.FOUND:
            is_batch = access.is_batch(queue)
            messages = messages_of(result.batch, queue, is_batch=is_batch)
            # Copied: a message must not keep its whole batch in memory.
            return [_own(message) for message in messages]
        if result.status not in (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL):
            return []
        request = replace(request, offset=result.next_offset)
    return []


def _own(message: Message) -> Message:
    return Message(
        message.queue,
        message.queue_offset,
        memoryview(bytes(message.data)),
        message.store_timestamp,
        inner_num=message.inner_num,
        is_in_batch_queue=message.is_in_batch_queue,
    )


BODY_ONE_BYTES, BODY_MANY_BYTES = 64 << 10, 4 << 10
"""Limits of the shown body: of a single message, and of one of several."""
PROPERTIES_MAX = 200
INNER_SHOWN = 50
TOPICS_LISTED = 200
HEX_ROW = 16
_FORM_TEXTS = {
    "key": "Key or unique key",
    "id": "Message id",
    "time": "Time, from",
    "offset": "Offset",
}


def render_messages(
    search: Search, topics: Sequence[str], found: Sequence[Message], problem: Child, body_form: str
) -> Html:
    """The page: the form, and what was found or why nothing was."""
    parts: list[Child] = [_form(search, topics), problem]
    if found:
        note = f"the first {MESSAGES_MAX}" if len(found) == MESSAGES_MAX else f"{len(found)} found"
        articles = [_article(message, search, body_form, is_only=len(found) == 1) for message in found]
        parts.append(section("found", "Messages", articles, is_live=False, note=note))
    return tag("div", parts, class_="grid")


def _form(search: Search, topics: Sequence[str]) -> Html:
    options = [tag("option", _FORM_TEXTS[form], value=form, selected=form == search.form) for form in FORMS]
    listed = [tag("option", value=topic) for topic in topics[:TOPICS_LISTED]]
    return tag(
        "form",
        tag(
            "label",
            "Topic",
            tag(
                "input",
                name="topic",
                value=search.topic,
                list="topics",
                autocomplete="off",
                spellcheck="false",
            ),
        ),
        tag("datalist", listed, id="topics"),
        tag(
            "label",
            "Queue",
            tag(
                "input",
                name="queue",
                inputmode="numeric",
                size="5",
                placeholder="all",
                value="" if search.queue_id is None else search.queue_id,
            ),
        ),
        tag("label", "Find by", tag("select", options, name="by")),
        tag(
            "label",
            "Value",
            tag(
                "input",
                name="value",
                value=search.value,
                required=True,
                autocomplete="off",
                spellcheck="false",
                placeholder="key, id, 2026-11-23T07:00:00Z, or offset",
            ),
            class_="wide",
        ),
        tag(
            "label",
            tag("input", type="checkbox", name="whole", value="1", checked=search.is_whole),
            "All time",
            class_="check",
            title="Search by key reads the newest 7 days without this",
        ),
        tag("button", "Search"),
        method="get",
        action="/messages",
        role="search",
        class_="bar",
    )


def message_path(message: Message, **others: object) -> str:
    """The page of this message."""
    fields = {
        "by": "offset",
        "topic": message.topic,
        "queue": message.queue_id,
        "generation": message.queue.generation,
        "value": message.queue_offset,
    }
    return f"/messages?{urlencode(fields | others)}"


def _article(message: Message, search: Search, body_form: str, *, is_only: bool) -> Html:
    place = f"{message.topic} · queue {message.queue_id} · offset {message.queue_offset:,}"
    try:
        content = _content(message, body_form, is_only=is_only)
        keys = " ".join(message.keys)
    except CorruptionError as error:
        content, keys = tag("p", f"This record cannot be decoded: {error}", class_="notice bad"), ""
    summary = tag(
        "summary", tag("strong", place), tag("span", date_text(message.store_timestamp)), tag("span", keys)
    )
    return tag("details", summary, content, open=is_only, class_="message")


def _content(message: Message, body_form: str, *, is_only: bool) -> Html:
    record = message.record
    properties = sorted(message.properties.items())
    pairs: list[tuple[str, Child]] = [
        ("Topic", message.topic),
        (
            "Queue and offset",
            f"{message.queue_id}, {message.queue_offset:,}, generation {message.queue.generation}",
        ),
        ("Stored", date_text(message.store_timestamp)),
        ("Born", f"{date_text(message.born_timestamp)}, {record.born_host}"),
        ("Broker", record.store_host),
        ("Tags", message.tags or "none"),
        ("Keys", " ".join(message.keys) or "none"),
        ("Unique key", message.unique_key or "none"),
        ("Message id (offsetMsgId)", message.offset_msg_id),
        ("Physical offset", count_text(record.physical_offset)),
        ("Record size", bytes_text(len(message.data))),
        ("Deliveries before", count_text(record.reconsume_times)),
        ("sysFlag, flag", f"{record.sys_flag}, {record.flag}"),
    ]
    shown = table("Properties", ["Property", "Value"], [(k, v) for k, v in properties[:PROPERTIES_MAX]])
    more = len(properties) - PROPERTIES_MAX
    links = [
        tag("a", "← Previous", href=message_path(message, value=message.queue_offset - 1))
        if message.queue_offset
        else None,
        tag("a", "Next →", href=message_path(message, value=message.queue_offset + message.inner_num)),
        tag("a", "Only this message", href=message_path(message)) if not is_only else None,
    ]
    return tag(
        "div",
        facts(pairs),
        _body(message, body_form, BODY_ONE_BYTES if is_only else BODY_MANY_BYTES),
        _inner(message),
        tag("h3", "Properties"),
        shown,
        tag("p", f"{more} more", class_="note") if more > 0 else None,
        tag("nav", links, class_="pages", aria_label="Neighbours"),
    )


def _body(message: Message, form: str, bytes_max: int) -> Html:
    try:
        body = message.body
    except CorruptionError as error:
        return tag("p", f"The body cannot be shown: {error}", class_="notice bad")
    text = None if form == "hex" else body_text_of(body, bytes_max)
    other = "text" if form == "hex" else "hex"
    head = tag(
        "h3",
        "Body",
        tag("small", bytes_text(len(body))),
        tag("a", f"as {other}", href=message_path(message, form=other)),
    )
    cut = f"the first {bytes_text(bytes_max)} of {bytes_text(len(body))}" if len(body) > bytes_max else None
    shown = tag("pre", lines(text) if text is not None else lines(hex_dump(body[:bytes_max])), tabindex="0")
    return tag("div", head, shown if body else tag("p", "empty", class_="note"), tag("p", cut, class_="note"))


def body_text_of(body: bytes, bytes_max: int) -> str | None:
    """The first ``bytes_max`` of ``body`` as text; None if it is not text."""
    part = body[:bytes_max]
    try:
        text = part.decode("utf-8")
    except UnicodeDecodeError as error:
        # The cut may be inside a character.
        if len(body) <= bytes_max or error.start < len(part) - 3:
            return None
        text = part[: error.start].decode("utf-8")
    acting = sum(unicodedata.category(character) == "Cc" for character in text if character not in "\n\r\t")
    return None if acting * 20 > len(text) else text


def hex_dump(data: bytes) -> str:
    """Offset, sixteen bytes in hex, and the ASCII characters among them, line by line."""
    rows = []
    for at in range(0, len(data), HEX_ROW):
        row = data[at : at + HEX_ROW]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        rows.append(f"{at:08x}  {row.hex(' '):<{3 * HEX_ROW}} {text}")
    return "\n".join(rows)


def _inner(message: Message) -> Html | None:
    try:
        inner = message.inner
    except CorruptionError as error:
        return tag("p", f"The inner batch cannot be decoded: {error}", class_="notice bad")
    if not inner:
        return None
    rows = [
        (
            count_text(message.queue_offset + i),
            _first(item.properties),
            bytes_text(len(item.body)),
            body_text_of(item.body, 200) or item.body[:100].hex(" "),
        )
        for i, item in enumerate(inner[:INNER_SHOWN])
    ]
    return tag(
        "div",
        tag("h3", "Inner batch", tag("small", counted(len(inner), "message"))),
        table("Inner batch", ["Offset", "Keys", "Size", "Body"], rows, (2,)),
    )


def _first(properties: Mapping[str, str]) -> str:
    return properties.get("KEYS") or properties.get("UNIQ_KEY") or ""
