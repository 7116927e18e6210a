"""Renders the search for messages and the messages found, with properties and body. Pure."""

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
"""A search by key covers so much time before the newest message, as `tiered query` does, or the whole archive."""
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


def parse_search(query: Mapping[str, str]) -> Search:
    """Return the search that the fields of the form describe. Raises UsageError for an impossible one."""
    form = query.get("by", "key")
    if form not in FORMS:
        raise UsageError(
            f"messages cannot be searched by {form}", hint=f"search by one of {', '.join(FORMS)}"
        )
    search = Search(
        form,
        query.get("topic", ""),
        query.get("value", "").strip(),
        _number(query, "queue"),
        _number(query, "generation"),
        query.get("whole") == "1",
    )
    if search.value and form != "id" and not search.topic:
        raise UsageError(f"a search by {form} needs a topic", hint="choose a topic")
    return search


def _number(query: Mapping[str, str], name: str) -> int | None:
    """Return the number in field ``name`` of a form; None if the field is empty. Raises UsageError for anything
    else."""
    text = query.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,19}", text):
        raise UsageError(f"field {name}: {text} is not a number", hint="enter a whole number, counted from 0")
    return int(text)


def find_messages(access: ArchiveAccess, search: Search) -> list[Message]:
    """Return the messages that ``search`` finds, at most MESSAGES_MAX: by key the newest first, by time the oldest
    first. Raises NotFoundError if there are none, UsageError for an impossible search, and UnavailableError or
    CorruptionError if the archive cannot be read."""
    if search.form == "key":
        found = _by_key(access, search, KeyKind.ANY)
    elif search.form == "id":
        found = _by_id(access, search)
    elif search.form == "time":
        found = _by_time(access, search, parse_instant(search.value))
    else:
        found = _by_offset(access, search)
    if not found:
        raise NotFoundError(_not_found_text(search))
    return found


def _not_found_text(search: Search) -> str:
    """Return the sentence that says which search found nothing, and whether older messages were not searched."""
    where = f" in topic {search.topic}" if search.topic else ""
    words = {
        "key": "with key",
        "id": "with id",
        "time": "stored at or after",
        "offset": "at offset",
    }[search.form]
    days = KEY_RANGE_MS // 86_400_000
    is_partial = search.form == "key" and not search.is_whole
    period = f" among those of the newest {days} days" if is_partial else ""
    return f"the archive has no message {words} {search.value}{where}{period}"


def _by_key(access: ArchiveAccess, search: Search, kind: KeyKind) -> list[Message]:
    """Return messages whose key is the searched value. A search by key or unique key (KeyKind.ANY) covers the newest
    KEY_RANGE_MS, unless the whole archive is to be searched; one by unique key alone covers everything."""
    since_ms = None
    if kind is KeyKind.ANY and not search.is_whole:
        # A message from the future (flipped bit, wrong clock) must not hide all others.
        newest = min(newest_ms(access.state), wall_ms())
        since_ms = max(0, newest - KEY_RANGE_MS)
    finding = access.find_by_key(
        search.topic, search.value, kind, since_ms, None, MESSAGES_MAX, MESSAGES_BYTES_MAX
    )
    found = run_sync(access.while_open(finding))
    return [message for message in found if search.queue_id in (None, message.queue_id)]


def _by_id(access: ArchiveAccess, search: Search) -> list[Message]:
    """Return the messages with an id, which is either the broker's (offsetMsgId, a place in its log) or that of the
    producer's client (UNIQ_KEY, a property). Both may look alike; the client's needs a topic, or UsageError is
    raised."""
    is_broker_id = _OFFSET_MSG_ID.fullmatch(search.value) is not None
    if is_broker_id:
        found = run_sync(access.while_open(access.find_by_id(search.value)))
        if found is not None and search.topic in ("", found.topic):
            return [found]
    if search.topic:
        return _by_key(access, search, KeyKind.UNIQUE)
    if is_broker_id:
        return []
    raise UsageError("a search by unique key needs a topic", hint="choose a topic")


def _by_time(access: ArchiveAccess, search: Search, time_ms: int) -> list[Message]:
    """Return the first MESSAGES_MAX messages stored at or after ``time_ms`` in the topic or the chosen queue, in order
    of time. Raises UsageError for a topic with more than QUEUES_MAX queues, each of which would have to be read."""
    queues = [
        queue.key
        for queue in access.queues(search.topic, hidden=False)
        if search.queue_id in (None, queue.queue_id)
    ]
    if len(queues) > QUEUES_MAX:
        raise UsageError(
            f"topic {search.topic} has {len(queues):,} queues, too many for a search by time",
            hint="choose one queue",
        )

    async def first_messages(queue: QueueKey) -> list[Message]:
        offset = await access.offset_by_time(queue, time_ms, Boundary.LOWER)
        return await _from(access, queue, offset, MESSAGES_MAX)

    async def all_first_messages() -> list[list[Message]]:
        return await gather([first_messages(queue) for queue in queues])

    by_queue = run_sync(access.while_open(all_first_messages()))
    # Times within a queue need not be in order, so that earlier messages may follow.
    found = [message for messages in by_queue for message in messages if message.store_timestamp >= time_ms]
    found.sort(key=lambda message: (message.store_timestamp, message.queue, message.queue_offset))
    return found[:MESSAGES_MAX]


def _by_offset(access: ArchiveAccess, search: Search) -> list[Message]:
    """Return the message at the searched offset of the chosen queue, or the batch of messages that spans it; an empty
    list if there is none. Raises UsageError if no queue was chosen."""
    if search.queue_id is None:
        raise UsageError("a search by offset needs a queue", hint="choose a queue")
    offset = _number({"offset": search.value}, "offset")
    assert offset is not None
    queue = access.queue_key(search.topic, search.queue_id, search.generation)
    found = run_sync(access.while_open(_from(access, queue, offset, 1)))
    # The next message behind a gap is not the one that was searched.
    return [
        message
        for message in found
        if message.queue_offset <= offset < message.queue_offset + max(1, message.inner_num)
    ]


async def _from(access: ArchiveAccess, queue: QueueKey, offset: int, count: int) -> list[Message]:
    """Return at most ``count`` messages of ``queue``: those at ``offset`` or the next ones behind it, as offsets may be
    missing or expired."""
    # A search by time reads several queues at the same time.
    size = MESSAGES_BYTES_MAX // (8 if count > 1 else 1)
    request = PullRequest(
        queue.topic, queue.queue_id, offset, count, size, GROUP, generation=queue.generation
    )
    for _ in range(STEPS_MAX):
        result = await access.fetcher.pull(request)
        if result.status is PullStatus.FOUND:
            messages = list(messages_of(result.batch, queue, is_batch=access.is_batch(queue)))
            for message in messages:  # a copy of its bytes does not keep the whole batch in memory
                message.data = memoryview(bytes(message.data))
            return messages
        if result.status not in (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL):
            return []
        request = replace(request, offset=result.next_offset)
    return []


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
    """Return the page of messages: the search form, and the messages found, or in ``problem`` why there are none.
    ``body_form``: "text" or "hex"."""
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
    """Return a message with its keys, properties, body and, if it is a batch, the messages inside; or with the reason
    why it cannot be decoded. A message that is the only one has more of its body shown."""
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
    """Return the first ``bytes_max`` bytes of a message's body, as text if it is text and ``form`` is not "hex", else
    as a hex dump; with the path of the page that shows the other form."""
    try:
        body = message.body
    except CorruptionError as error:
        return ShownBody(problem=f"The body cannot be shown: {error}")
    text = None if form == "hex" else body_text_of(body, bytes_max)
    other = "text" if form == "hex" else "hex"
    path = message_path(message.queue, message.queue_offset, form=other)
    return ShownBody(len(body), bytes_max, hex_dump(body[:bytes_max]) if text is None else text, other, path)


def body_text_of(body: bytes, bytes_max: int) -> str | None:
    """Return the first ``bytes_max`` bytes of ``body`` as text. None: it is not text, as it is not UTF-8 or more than a
    twentieth of it are control characters."""
    shown = body[:bytes_max]
    try:
        text = shown.decode("utf-8")
    except UnicodeDecodeError as error:
        # The end of what is shown may lie inside a character of up to four bytes.
        if len(body) <= bytes_max or error.start < len(shown) - 3:
            return None
        text = shown[: error.start].decode("utf-8")
    controls = sum(unicodedata.category(character) == "Cc" for character in text if character not in "\n\r\t")
    return None if controls * 20 > len(text) else text


def hex_dump(data: bytes) -> str:
    """Return ``data`` as lines of offset, sixteen bytes in hex, and the ASCII characters among them."""
    rows = []
    for offset in range(0, len(data), HEX_ROW):
        row = data[offset : offset + HEX_ROW]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        rows.append(f"{offset:08x}  {row.hex(' '):<{3 * HEX_ROW}} {text}")
    return "\n".join(rows)


def _inner(message: Message) -> ShownInner:
    """Return the first INNER_SHOWN messages of the batch that a message may be: queue offset, key, size and begin of
    the body of each. For a message that is no batch the list is empty."""
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
