"""Signs requests: HMAC-SHA1 over fields and body, as clients do.

    content   = values of all fields but Signature, by field name, as UTF-8, then the body
    Signature = base64(HMAC-SHA1(secret, content))

Owns signing and the file with the account. Never shows a secret.

Sources: org.apache.rocketmq.acl.common.AclClientRPCHook, AclUtils, AclSigner; mqadmin's conf/tools.yml.
"""

import base64
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tiered.errors import UsageError
from tiered.private_directory import check_trusted_file

ACCESS_KEY, SIGNATURE, SECURITY_TOKEN = "AccessKey", "Signature", "SecurityToken"


def signature_of(fields: Mapping[str, str], body: bytes, secret: str) -> str:
    """The field Signature of a client with ``secret``."""
    content = "".join([fields[name] for name in sorted(fields) if name != SIGNATURE]).encode() + body
    return base64.b64encode(hmac.digest(secret.encode(), content, "sha1")).decode("ascii")


@dataclass(frozen=True)
class Credentials:
    """An account of an ACL-enabled broker (ACL 1.0, or users of 5.x)."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str = field(default="", repr=False)

    def signed(self, fields: Mapping[str, str], body: bytes = b"") -> dict[str, str]:
        """``fields`` of a request with ``body``, and the account's access key and signature in addition."""
        found = {**fields, ACCESS_KEY: self.access_key}
        if self.security_token:
            found[SECURITY_TOKEN] = self.security_token
        found[SIGNATURE] = signature_of(found, body, self.secret_key)
        return found


def read_credentials(path: Path) -> Credentials:
    """The account in a YAML file with accessKey and secretKey, like mqadmin's ``conf/tools.yml``. Raises UsageError for
    an unusable file; the message contains nothing of the file, which is secret."""
    import yaml  # import takes 0.03 s

    hint = "set broker.credentials_file to YAML with accessKey and secretKey, like mqadmin's conf/tools.yml"
    try:
        check_trusted_file(path, "broker.credentials_file")
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"credentials file {path} cannot be read: {error.strerror}", hint=hint) from error
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"credentials file {path} is not YAML", hint=hint) from None
    found = document if isinstance(document, dict) else {}
    keys = [found.get(name) for name in ("accessKey", "secretKey")]
    if not all(isinstance(key, str | int) and str(key).strip() for key in keys):
        raise UsageError(f"credentials file {path} has no accessKey and secretKey", hint=hint)
    return Credentials(str(keys[0]).strip(), str(keys[1]).strip(), str(found.get("securityToken") or ""))
