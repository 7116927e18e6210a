"""Object keys: building and parsing them, and the escape of names inside them.

Keys are relative to the archive's prefix, ``<cluster>/<broker>`` below the store's URL. Every name has exactly one
escape and no two names share one, so listing a prefix never shows another topic's objects.
"""

import hashlib
import re
from typing import NamedTuple

from tiered.errors import UsageError
from tiered.model.queue import QueueKey

CATALOG_PREFIX = "catalog/"
PAGES_PREFIX = "pages/"
DATA_PREFIX = "data/"
SETS_PREFIX = "sets/"
INDEX_PREFIX = "index/"
STATE_PREFIX = "state/"
TIMER_PREFIX = "timer/"
SERVE_PREFIX = "state/serve/"
"""State that servers keep for clients; no commit names it."""
PRIVATE_KEY = "private/key"
"""For the sidecar only: policies by role deny it to all others."""
KEYS_PREFIX = "keys/"
"""The wrapped keys of an encrypted archive, in versions; no commit names them."""

ESCAPED_CHARACTERS_MAX = 200
"""Longer escapes are cut and end in a digest: file systems allow 255 bytes a path component."""

COMPACTION_ATTEMPTS_FROM = 10**15
"""Attempts from here on are those of compaction: no writer counts so far."""

VERSION_END = 10**16
"""No archive reaches this version: a name with a higher number belongs to something else."""
_VERSION_CEILING = 10**20 - 1
_PLAIN = re.compile(rb"[A-Za-z0-9_-]")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_-]|\.[0-9a-f]{2})+\Z")
_EMPTY = ".-"
"""The escape of the empty name."""
_CUT = ".."
"""In the escape of a name that is too long: its digest follows."""
_DIGEST_CHARACTERS = 32
_DATA_KEY = re.compile(
    r"data/[0-9a-f]{2}/(?P<topic>[^/]+)/(?P<generation>\d{1,10})/(?P<queue_id>-?\d{1,10})/"
    r"(?P<base>\d{20})-(?P<epoch>\d{1,16})-(?P<attempt>\d{1,20})\.so\Z",
    re.ASCII,
)
_SET_KEY = re.compile(
    r"sets/[0-9a-f]{2}/(?P<batch>[A-Za-z0-9_]+)-(?P<epoch>\d{1,16})-(?P<attempt>\d{1,20})\.sso\Z",
    re.ASCII,
)
_PAGE_KEY = re.compile(
    r"pages/[A-Za-z0-9_]+-0{4}(?P<version>\d{16})-(?P<epoch>\d{1,16})-[A-Za-z0-9_]+\Z", re.ASCII
)
_STATE_KEY = re.compile(
    r"state/(?P<table>[A-Za-z0-9_]+)-(?P<epoch>\d{1,16})-(?P<attempt>\d{1,20})-[A-Za-z0-9_]+\Z", re.ASCII
)
_INDEX_KEY = re.compile(r"index/\d{13,20}-\d{13,20}-(?P<epoch>\d{1,16})_[A-Za-z0-9_]+\.idx\Z", re.ASCII)
_TIMER_KEY = re.compile(r"timer/\d{20}-(?P<epoch>\d{1,16})\Z", re.ASCII)
_CATALOG_KEY = re.compile(r"catalog/(9{4}\d{16})\Z", re.ASCII)
_PART = re.compile(r"([^:]*):(\d{1,20}):(\d{1,20})\Z", re.ASCII)
_VERSION_NAME = re.compile(r"\d{20}\Z", re.ASCII)
_BATCH_ID = re.compile(r"[A-Za-z0-9_]{1,64}\Z")
_LABEL = re.compile(r"[A-Za-z0-9_]{1,64}\Z")


class DataKeyParts(NamedTuple):
    """The parts of a stream object's key. ``topic`` is None for a name whose escape was cut."""

    topic: str | None
    queue_id: int
    generation: int
    base_queue_offset: int
    epoch: int
    attempt: int


class Part(NamedTuple):
    """A byte range of an object."""

    key: str
    offset: int
    length: int


class SetKeyParts(NamedTuple):
    """The parts of a stream set object's key."""

    batch_id: str
    epoch: int
    attempt: int


def escape(name: str) -> str:
    """The form of ``name``, which may be any text, in object keys: up to 234 of the characters ``[A-Za-z0-9._-]``,
    never ``.`` or ``..``. No two names have the same form.

    Bytes outside ``[A-Za-z0-9_-]`` become a dot and two hex digits. A form that is longer than ESCAPED_CHARACTERS_MAX
    is cut, and ends in two dots and half a SHA-256 of the whole name; two dots occur in no other form."""
    if not name:
        return _EMPTY
    encoded = name.encode("utf-8", "surrogateescape")
    parts = [chr(byte) if _PLAIN.match(bytes([byte])) else f".{byte:02x}" for byte in encoded]
    escaped = "".join(parts)
    if len(escaped) <= ESCAPED_CHARACTERS_MAX:
        return escaped
    kept = ""
    for part in parts:
        if len(kept) + len(part) > ESCAPED_CHARACTERS_MAX:
            break
        kept += part
    return f"{kept}{_CUT}{hashlib.sha256(encoded).hexdigest()[:_DIGEST_CHARACTERS]}"


def unescape(escaped: str) -> str | None:
    """The name for which ``escape`` returns ``escaped``; None if the escape was too long and therefore cut: then only
    the object's footer has the name.

    Raises UsageError for text that ``escape`` never returns.
    """
    if escaped == _EMPTY:
        return ""
    if _CUT in escaped:
        return None
    if _ESCAPED.match(escaped) is None:
        raise UsageError(f"{escaped[:200]!r} is not the form of a name in object keys")
    encoded = re.sub(rb"\.([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), escaped.encode("ascii"))
    name = encoded.decode("utf-8", "surrogateescape")
    if escape(name) != escaped:
        raise UsageError(f"{escaped[:200]!r} is not the form of a name in object keys")
    return name


def is_escape(text: str) -> bool:
    """Whether ``text`` is the escape of a name, whole or cut."""
    try:
        unescape(text)
    except UsageError:
        return False
    return True


def is_version_name(text: str) -> bool:
    """Whether ``text`` is what ``version_name`` returns. Other objects may lie beside numbered ones: bucket browsers
    leave objects named like a folder, and a shorter number would list before all versions."""
    return _VERSION_NAME.match(text) is not None


def version_name(version: int) -> str:
    """The last part of the key of a numbered object: newer versions list first."""
    assert 0 <= version <= _VERSION_CEILING
    return f"{_VERSION_CEILING - version:020d}"


def archive_prefix(cluster: str, broker: str) -> str:
    """The prefix of a broker's archive below the store's URL, without a slash at the end."""
    return f"{escape(cluster)}/{escape(broker)}"


def data_key(queue: QueueKey, base_queue_offset: int, epoch: int, attempt: int) -> str:
    """The key of a stream object (SO): one queue's segment, named by its base offset."""
    return f"{queue_prefix(queue, base_queue_offset)}{epoch}-{attempt}.so"


def queue_prefix(queue: QueueKey, base_queue_offset: int) -> str:
    """How the keys of all stream objects of a queue with this base offset begin."""
    identity = f"{queue.topic}\0{queue.generation}\0{queue.queue_id}"
    return (
        f"{DATA_PREFIX}{_spread(identity)}/{escape(queue.topic)}/{queue.generation}/{queue.queue_id}/"
        f"{base_queue_offset:020d}-"
    )


def parse_data_key(key: str) -> DataKeyParts | None:
    """What the key of a stream object (one queue's messages) tells: topic, queue, offset, epoch, attempt; None for
    other keys."""
    found = _DATA_KEY.match(key)
    if found is None or not is_escape(found["topic"]):
        return None
    generation, queue_id, base = (int(found[name]) for name in ("generation", "queue_id", "base"))
    if generation >= 1 << 32 or not -(1 << 31) <= queue_id < 1 << 31 or base >= 1 << 63:
        return None
    epoch, attempt = int(found["epoch"]), int(found["attempt"])
    return DataKeyParts(unescape(found["topic"]), queue_id, generation, base, epoch, attempt)


def batch_id(from_phys: int, ttl_class_days: int) -> str:
    """The batch id of the stream set objects of a cycle that begins at ``from_phys``, of one TTL class; 0: forever."""
    return f"{from_phys:020d}_{ttl_class_days}d" if ttl_class_days else f"{from_phys:020d}"


def set_key(batch_id: str, epoch: int, attempt: int) -> str:
    """The key of a stream set object (SSO). ``batch_id`` is ``[A-Za-z0-9_]``: retries of a batch share it."""
    return f"{set_prefix(batch_id)}{epoch}-{attempt}.sso"


def set_prefix(batch_id: str) -> str:
    """How the keys of all attempts at a stream set object begin."""
    if _BATCH_ID.match(batch_id) is None:
        raise UsageError(f"{batch_id[:200]!r} is not the batch id of a stream set object")
    return f"{SETS_PREFIX}{_spread(batch_id)}/{batch_id}-"


def parse_set_key(key: str) -> SetKeyParts | None:
    """The parts of a stream set object's key; None for other keys."""
    found = _SET_KEY.match(key)
    return None if found is None else SetKeyParts(found["batch"], int(found["epoch"]), int(found["attempt"]))


def compaction_attempts_from(nonce: int) -> int:
    """The first attempt number that a compaction uses in the keys of its objects; the 10^6 from it on are its own.
    ``nonce``: 40 random bits, so that two compactions do not use the same numbers."""
    return (nonce | 1 << 39) * 10**6


def is_compacted(key: str) -> bool:
    """Whether compaction wrote the data object."""
    attempt = key.rpartition("-")[2].partition(".")[0]
    return attempt.isdecimal() and int(attempt) >= COMPACTION_ATTEMPTS_FROM


def catalog_key(version: int) -> str:
    """The key of commit ``version``. Newer versions list first: the head is the first key of one LIST."""
    return f"{CATALOG_PREFIX}{version_name(version)}"


def parse_catalog_key(key: str) -> int | None:
    """The version in a commit's key; None for other keys."""
    found = _CATALOG_KEY.match(key)
    return None if found is None else _VERSION_CEILING - int(found[1])


def page_key(kind: str, version: int, epoch: int, digest: str) -> str:
    """The key of an immutable catalog page of ``kind`` made for ``version``; ``digest`` is of its content."""
    assert _LABEL.match(kind) and _LABEL.match(digest)
    return f"{PAGES_PREFIX}{kind}-{version:020d}-{epoch}-{digest}"


def page_version(key: str) -> int | None:
    """The version in the key of a catalog page; None for other keys."""
    found = _PAGE_KEY.match(key)
    return None if found is None else int(found["version"])


def part_key(key: str, offset: int, length: int) -> str:
    """The name of a page stored inside the object ``key``; no object key contains a colon."""
    return f"{key}:{offset}:{length}"


def parse_part_key(key: str) -> Part | None:
    """The part that ``key`` names; None when it names a whole object."""
    found = _PART.match(key)
    return None if found is None else Part(found[1], int(found[2]), int(found[3]))


def object_of(key: str) -> str:
    """The object that ``key`` names or names a part of."""
    return key.partition(":")[0]


def index_key(begin_ms: int, end_ms: int, epoch: int, identity: str) -> str:
    """The key of an index file over messages stored in [begin, end] (ms since the epoch), made in ``epoch``."""
    assert _LABEL.match(identity)
    return f"{INDEX_PREFIX}{max(0, begin_ms):013d}-{max(0, end_ms):013d}-{epoch}_{identity}.idx"


def timer_key(epoch: int, number: int) -> str:
    """The key of an object of timers made in ``epoch``."""
    return f"{TIMER_PREFIX}{number:020d}-{epoch}"


def state_key(name: str, epoch: int, attempt: int, digest: str) -> str:
    """The key of a snapshot of one broker table; it ends in the digest of the content."""
    assert _LABEL.match(name) and _LABEL.match(digest)
    return f"{STATE_PREFIX}{name}-{epoch}-{attempt}-{digest}"


def parse_state_key(key: str) -> tuple[str, int, int] | None:
    """(table, epoch, attempt) of a snapshot of one broker table; None for other keys."""
    found = _STATE_KEY.match(key)
    return None if found is None else (found["table"], int(found["epoch"]), int(found["attempt"]))


def _spread(identity: str) -> str:
    """Two hex digits that spread keys over the store's partitions (and over directories)."""
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:2]


def epoch_of(key: str) -> int | None:
    """The epoch in a key, which is the number of the writer that made the object: a segment of one queue or of several
    (a set), a page of the catalog, a snapshot of a broker table, an index file or an object of timers. None for keys
    without an epoch, such as those of commits and foreign objects."""
    data = parse_data_key(key)
    if data is not None:
        return data.epoch
    parts = parse_set_key(key)
    if parts is not None:
        return parts.epoch
    patterns = (_PAGE_KEY, _STATE_KEY, _INDEX_KEY, _TIMER_KEY)
    found = next(filter(None, (pattern.match(key) for pattern in patterns)), None)
    return None if found is None else int(found["epoch"])
