"""Validates keys. All back ends accept the same ones, so that an archive can move between them."""

import re

from tiered.errors import UsageError

KEY_BYTES_MAX = 1024
_COMPONENT = re.compile(r"[A-Za-z0-9._=%-]+\Z")
_KEY = re.compile(r"[A-Za-z0-9._=%-]+(?:/[A-Za-z0-9._=%-]+)*\Z")
_DOTS = re.compile(r"(?:^|/)\.{1,2}(?:/|$)")
_SINGLE_PUT = frozenset({"catalog", "pages"})


def check_key(key: str) -> str:
    """``key`` if it is a valid object key: components of the characters ``[A-Za-z0-9._=%-]``, joined by slashes, but
    not ``.`` or ``..``. Raises UsageError for any other. Only exports use = and %."""
    if len(key) > KEY_BYTES_MAX or _KEY.match(key) is None or _DOTS.search(key) is not None:
        raise UsageError(
            f"object key {key[:200]} is invalid",
            hint="use components of the characters [A-Za-z0-9._=%-], joined by /",
        )
    return key


def is_component(name: str) -> bool:
    """Whether ``name`` is a valid component of a key."""
    return _COMPONENT.match(name) is not None


def is_single_put(key: str) -> bool:
    """Whether the object must be one PUT: commits rely on an atomic one, which multipart completion is not."""
    return not _SINGLE_PUT.isdisjoint(key.split("/"))
