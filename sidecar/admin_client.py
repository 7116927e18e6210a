"""Requests the status of a running instance at its admin address."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import orjson

from tiered.errors import UnavailableError

TIMEOUT_S = 10.0


def fetch_status(admin_url: str) -> dict[str, Any]:
    """The /status.json of the instance at ``admin_url``; UnavailableError when it does not answer."""
    address = urlsplit(admin_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/status.json")
        answer = connection.getresponse()
        if answer.status != 200:
            raise UnavailableError(
                f"{admin_url} returned HTTP {answer.status}", hint="check the instance's log"
            )
        document: dict[str, Any] = orjson.loads(answer.read())
    except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
        raise UnavailableError(
            f"{admin_url} does not answer: {error}", hint="check whether the instance is stuck"
        ) from None
    finally:
        connection.close()
    return document
