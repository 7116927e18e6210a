"""Requests status and metrics of a running instance at its admin address."""

import http.client
from typing import Any
from urllib.parse import urlsplit

import orjson

from tiered.errors import UnavailableError

TIMEOUT_S = 5.0
"""A working instance answers immediately, whatever its store and broker do."""


def fetch_status(admin_url: str) -> dict[str, Any]:
    """The /status.json of the instance at ``admin_url``; UnavailableError when it does not answer."""
    try:
        document: dict[str, Any] = orjson.loads(_fetch(admin_url, "/status.json"))
    except orjson.JSONDecodeError as error:
        raise _unanswered(admin_url, error) from None
    return document


def fetch_metrics(admin_url: str) -> str:
    """The /metrics of the instance at ``admin_url``; UnavailableError when it does not answer."""
    return _fetch(admin_url, "/metrics").decode("utf-8", "replace")


def _fetch(admin_url: str, path: str) -> bytes:
    """The body of the reply to GET ``path``. Raises UnavailableError if there is none, or if its status is not 200."""
    address = urlsplit(admin_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise UnavailableError(
                f"GET {admin_url}{path} returned HTTP status {answer.status}",
                hint="the log of the instance has the cause",
            )
        return answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise _unanswered(admin_url, error) from None
    finally:
        connection.close()


def _unanswered(admin_url: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"the instance at {admin_url} does not answer: {error}",
        hint="see its log, and restart it if it is stuck",
    )
