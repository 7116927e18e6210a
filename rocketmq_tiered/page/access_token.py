"""Who may see the pages: on a loopback address every user of the host, unless a token is set; elsewhere its owners.

The token is the password of HTTP's Basic authentication, with any user name, so browsers ask for it. Owns reading,
comparing and the log of failures.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import threading
import time
from pathlib import Path

from tiered.errors import UsageError
from tiered.private_directory import check_trusted_file

logger = logging.getLogger(__name__)

CHARS_MIN, CHARS_MAX = 16, 1024
FAILURES_LOGGED_EVERY_S = 60.0
CHALLENGE = 'Basic realm="rocketmq-tiered", charset="UTF-8"'


def read_token(path: str) -> str:
    """The first line of the file; empty if no file is set. Raises UsageError without any content of the file."""
    if not path:
        return ""
    hint = f"write a line of {CHARS_MIN} characters or more to it, such as the output of openssl rand -hex 24"
    try:
        check_trusted_file(Path(path), "admin.token_file")
        with Path(path).open(encoding="utf-8") as file:
            token = file.readline(CHARS_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"admin.token_file = {path} cannot be read: {why}", hint=hint) from None
    if len(token) < CHARS_MIN:
        raise UsageError(f"admin.token_file = {path} has no token of {CHARS_MIN} characters", hint=hint)
    return token


class AccessToken:
    """Compares the token of requests. Thread-safe."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._lock = threading.Lock()
        self._failed, self._logged_s = 0, float("-inf")

    def is_in(self, authorization: str | None, client: str) -> bool:
        """Whether the header Authorization has the token. Wrong ones are counted, and logged with ``client``."""
        if authorization is None:
            return False
        if hmac.compare_digest(_password_in(authorization), self._token):
            return True
        self._log_failure(client)
        return False

    def _log_failure(self, client: str) -> None:
        with self._lock:
            self._failed += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < FAILURES_LOGGED_EVERY_S:
                return
            count, self._failed, self._logged_s = self._failed, 0, now_s
        logger.warning("admin page refused: wrong token", extra={"client": client, "count": count})


def _password_in(authorization: str) -> bytes:
    """The password of Basic, or the token of Bearer; empty in anything else."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("utf-8", "replace")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""
