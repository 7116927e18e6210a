"""Entries of ``topics.rules`` as users write them, and the names of read policies. Pure.

What an entry means for a topic is in topic_rules.py.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiered.settings.quantities import BadValueError, byte_count, duration_ms

READ_POLICIES: Final = ("DISABLE", "NOT_IN_DISK", "NOT_IN_MEM", "FORCE")
"""Names in the order of RocketMQ's levels 0 to 3."""
_NAMES: Final = ("pattern", "ttl", "max_bytes", "read_policy", "key_compaction", "encryption_key")


@dataclass(frozen=True)
class RuleEntry:
    """One entry; values that it does not set are None. ``ttl`` is text such as ``7d`` or ``forever``."""

    pattern: str
    ttl: str | None = None
    max_bytes: int | None = None
    read_policy: str | None = None
    key_compaction: str | None = None
    """``on`` or ``off``."""
    encryption_key: str | None = None
    """The ring key of its own."""

    def to_json(self) -> dict[str, Any]:
        """The entry as in the settings file."""
        return {name: value for name in _NAMES if (value := getattr(self, name)) is not None}


def read_policy_name(value: object) -> str | None:
    """One of READ_POLICIES, written as a name or a level; None for anything else."""
    text = str(value).strip().upper()
    if text in ("0", "1", "2", "3"):
        return READ_POLICIES[int(text)]
    return text if text in READ_POLICIES else None


def parse_rules(written: Any) -> tuple[RuleEntry, ...]:
    """The rules of topics that a user has ``written``: an array of tables of a TOML file, or JSON text. Raises
    BadValueError for anything else, and for a wrong entry."""
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except (ValueError, RecursionError):
            raise BadValueError(_EXPECTATION) from None
    if not isinstance(written, list | tuple):
        raise BadValueError(_EXPECTATION)
    return tuple(_entry(number, value) for number, value in enumerate(written, 1))


_EXPECTATION = (
    'write [[topics.rules]] tables in the file, or JSON such as [{"pattern": "orders-*", "ttl": "7d"}]'
)


def _entry(number: int, value: Any) -> RuleEntry:
    """The rule that one table of ``topics.rules`` has. Raises BadValueError, which names the rule by its ``number``,
    counted from 1."""
    if isinstance(value, RuleEntry):
        return value
    if not isinstance(value, Mapping):
        raise BadValueError(_EXPECTATION)
    for name in value:
        if name not in _NAMES:
            close = difflib.get_close_matches(str(name), _NAMES, n=1)
            known = f"did you mean {close[0]}?" if close else f"a rule has {', '.join(_NAMES)}"
            raise BadValueError(f"rule {number}: {name} is not a field of a rule; {known}")
    pattern = value.get("pattern")
    if not isinstance(pattern, str) or not pattern.strip():
        raise BadValueError(f"rule {number}: set pattern to topic names, such as orders-*")
    if len(value) == 1:
        raise BadValueError(f"rule {number} sets nothing: add {', '.join(_NAMES[1:-1])} or {_NAMES[-1]}")
    return RuleEntry(
        pattern.strip(),
        _ttl(number, value["ttl"]) if "ttl" in value else None,
        _size(number, value["max_bytes"]) if "max_bytes" in value else None,
        _policy(number, value["read_policy"]) if "read_policy" in value else None,
        _switch(number, value["key_compaction"]) if "key_compaction" in value else None,
        _key(number, value["encryption_key"]) if "encryption_key" in value else None,
    )


def _ttl(number: int, value: object) -> str:
    try:
        duration_ms(str(value))
    except BadValueError as error:
        raise BadValueError(f"rule {number}, ttl: {error}") from None
    return str(value).strip().lower()


def _size(number: int, value: object) -> int:
    size = byte_count(value)
    if size is None:
        raise BadValueError(f'rule {number}, max_bytes: use a whole number of bytes, or text such as "10GiB"')
    return size


def _switch(number: int, value: object) -> str:
    text = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    if text not in ("on", "off"):
        raise BadValueError(f"rule {number}, key_compaction: use on or off")
    return str(text)


def _key(number: int, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadValueError(f"rule {number}, encryption_key: name a key of object_store.key_ring")
    return value.strip()


def _policy(number: int, value: object) -> str:
    name = read_policy_name(value)
    if name is None:
        raise BadValueError(f"rule {number}, read_policy: use one of {', '.join(READ_POLICIES)}")
    return name
