"""Checks a request's signature (computed in tiered/remoting/credentials.py). Pure."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from tiered.remoting.credentials import SIGNATURE, signature_of

_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"


def is_signed(fields: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Whether the request has the signature made with ``secret``; compared in constant time."""
    given = fields.get(SIGNATURE, "").encode()
    if hmac.compare_digest(signature_of(fields, body, secret).encode(), given):
        return True
    if _UNIQUE_KEY_QUERY not in fields:
        return False
    # Clients before 4.9.4 add this field after signing.
    signed = {name: value for name, value in fields.items() if name != _UNIQUE_KEY_QUERY}
    return hmac.compare_digest(signature_of(signed, body, secret).encode(), given)
