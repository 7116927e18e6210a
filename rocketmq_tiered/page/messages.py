"""Renders the search for messages and the messages found, with properties and body. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import gather, run_sync
from fetcher.queries.by_key import KeyKind
from fetcher.queries.source import newest_ms
from fetcher.queries.time_search import Boundary
from fetcher.rows.message import Message
from fetcher.rows.pull import PullRequest, PullStatus
from fetcher.walk import messages_of
from rocketmq_tiered.page.html import bytes_text, count_text, message_path, render
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.model.queue import QueueKey
from tiered.timestamps import parse_instant, wall_ms

MESSAGES_MAX = 20
MESSAGES_BYTES_MAX = 8 << 20
QUEUES_MAX = 64
KEY_RANGE_MS = 7 * 86_400_000
"""As `tiered query`: before the newest message, unless the whole archive is searched."""
FORMS = {
    "key": "Key or unique key",
    "id": "Message id",
    "time": "Time, from",
    "offset": "Offset",
}
"""What a search is by, and how the form names it."""
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
    """The line that says which search found nothing, and that older messages were not searched."""
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
    """Messages with the key or unique key; by key those of the newest KEY_RANGE_MS, unless the whole archive is
    searched."""
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
    raise UsageError("a search by unique key needs a topic", hint="choose one")


def _by_time(access: ArchiveAccess, search: Search, time_ms: int) -> list[Message]:
    """The first MESSAGES_MAX messages stored at or after ``time_ms`` in the topic or the chosen queue, by time.
    Raises UsageError for a topic with more than QUEUES_MAX queues."""
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
    """The message at the offset of the chosen queue, or the batch that spans it. Raises UsageError without a queue."""
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
    """``message`` with its bytes copied out of the batch that it came in."""
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
INNER_SHOWN = 50
TOPICS_LISTED = 200
HEX_ROW = 16


@dataclass(frozen=True)
class ShownBody:
    """The body of a message as text or hex, of at most ``bytes_max``, and the other form. ``problem``: why there is
    none."""

    bytes: int = 0
    bytes_max: int = 0
    text: str = ""
    other: str = ""
    other_path: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ShownInner:
    """The messages of an inner batch: their number, and (offset, keys, size, body) of the first ones."""

    count: int = 0
    rows: Sequence[tuple[str, str, str, str]] = ()
    problem: str = ""


@dataclass(frozen=True)
class ShownMessage:
    """A message, and what takes decoding. ``problem``: why its record cannot be decoded."""

    message: Message
    is_only: bool
    keys: str = ""
    properties: Sequence[tuple[str, str]] = ()
    body: ShownBody = ShownBody()
    inner: ShownInner = ShownInner()
    problem: str = ""


def render_messages(
    search: Search, topics: Sequence[str], found: Sequence[Message], problem: Markup, body_form: str
) -> Markup:
    """The page: the form, and what was found or why nothing was."""
    return render(
        "messages",
        search=search,
        topics=topics[:TOPICS_LISTED],
        forms=FORMS.items(),
        problem=problem,
        found=[_decoded(message, body_form, is_only=len(found) == 1) for message in found],
        note=f"the first {MESSAGES_MAX}" if len(found) == MESSAGES_MAX else f"{len(found)} found",
    )


def _decoded(message: Message, body_form: str, *, is_only: bool) -> ShownMessage:
    """Keys, properties, body and inner batch of a message to show, or why it cannot be decoded."""
    try:
        return ShownMessage(
            message,
            is_only,
            " ".join(message.keys),
            sorted(message.properties.items()),
            _body(message, body_form, BODY_ONE_BYTES if is_only else BODY_MANY_BYTES),
            _inner(message),
        )
    except CorruptionError as error:
        return ShownMessage(message, is_only, problem=f"This record cannot be decoded: {error}")


def _body(message: Message, form: str, bytes_max: int) -> ShownBody:
    """The first ``bytes_max`` bytes of a body, as text if it is text, else as a hex dump; with the path to the other
    form."""
    try:
        body = message.body
    except CorruptionError as error:
        return ShownBody(problem=f"The body cannot be shown: {error}")
    text = None if form == "hex" else body_text_of(body, bytes_max)
    other = "text" if form == "hex" else "hex"
    path = message_path(message.queue, message.queue_offset, form=other)
    return ShownBody(len(body), bytes_max, hex_dump(body[:bytes_max]) if text is None else text, other, path)


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


def _inner(message: Message) -> ShownInner:
    """The first INNER_SHOWN messages of an inner batch: offset, key, size and begin of the body."""
    try:
        inner = message.inner or ()
    except CorruptionError as error:
        return ShownInner(problem=f"The inner batch cannot be decoded: {error}")
    rows = [
        (
            count_text(message.queue_offset + i),
            item.properties.get("KEYS") or item.properties.get("UNIQ_KEY") or "",
            bytes_text(len(item.body)),
            body_text_of(item.body, 200) or item.body[:100].hex(" "),
        )
        for i, item in enumerate(inner[:INNER_SHOWN])
    ]
    return ShownInner(len(inner), rows)
