"""The signature of a request: HMAC-SHA1 over its fields and body, as clients make it. Pure.

    content   = values of all fields but Signature, by field name, as UTF-8, then the body
    Signature = base64(HMAC-SHA1(secret, content))

Sources: org.apache.rocketmq.acl.common.AclClientRPCHook, AclUtils, AclSigner.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping

ACCESS_KEY, SIGNATURE = "AccessKey", "Signature"
_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"


def signature_of(fields: Mapping[str, str], body: bytes, secret: str) -> str:
    """What a client that has ``secret`` puts into the field Signature."""
    content = "".join([fields[name] for name in sorted(fields) if name != SIGNATURE]).encode() + body
    return base64.b64encode(hmac.digest(secret.encode(), content, "sha1")).decode("ascii")


def is_signed(fields: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Whether the request carries the signature of ``secret``; compared in constant time."""
    given = fields.get(SIGNATURE, "").encode()
    if hmac.compare_digest(signature_of(fields, body, secret).encode(), given):
        return True
    if _UNIQUE_KEY_QUERY not in fields:
        return False
    # Clients before 4.9.4 add this field after signing.
    signed = {name: value for name, value in fields.items() if name != _UNIQUE_KEY_QUERY}
    return hmac.compare_digest(signature_of(signed, body, secret).encode(), given)
