"""Requests status and metrics of a running instance at its admin address."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from prometheus_client.parser import text_string_to_metric_families

from rocketmq_tiered.maintenance.cost import RequestCounts
from rocketmq_tiered.process.instance import InstanceDescription, running_instance, running_instances
from rocketmq_tiered.process.metrics import PREFIX
from tiered.errors import NotFoundError, UnavailableError

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
    """One page of an instance. Whatever goes wrong is UnavailableError: the instance may be starting or stuck."""
    address = urlsplit(admin_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise UnavailableError(
                f"{admin_url} returned HTTP {answer.status}", hint="check the instance's log"
            )
        return answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise _unanswered(admin_url, error) from None
    finally:
        connection.close()


def _unanswered(admin_url: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"{admin_url} does not answer: {error}", hint="check whether the instance is stuck"
    )


def instance_of(
    root: Path, state_dir: str, url: str, cluster: str, broker: str
) -> InstanceDescription | None:
    """The running instance of this host that writes the archive; None if there is none. ``root``: of default state
    directories."""
    try:
        running: Iterable[InstanceDescription] = (
            [running_instance(Path(state_dir))] if state_dir else running_instances(root)
        )
    except NotFoundError:
        return None
    wanted = (url.rstrip("/"), cluster, broker)
    return next(
        (one for one in running if (one.archive_url.rstrip("/"), one.cluster, one.broker) == wanted), None
    )


def read_counts(instance: InstanceDescription) -> RequestCounts | None:
    """Its counters; None if it does not answer."""
    try:
        text = fetch_metrics(instance.admin_url)
    except UnavailableError:
        return None
    return counts_in(text, time.time() - instance.started_ms / 1000)


def counts_in(metrics: str, seconds: float) -> RequestCounts:
    """The counters in ``metrics`` of a process that has run for ``seconds``. Pure."""
    by_request: dict[str, float] = {}
    moved = {f"{PREFIX}_provider_upload_bytes_sum": 0.0, f"{PREFIX}_provider_download_bytes_sum": 0.0}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == f"{PREFIX}_provider_rpc_latency_count":
                request = sample.labels.get("request", "")
                by_request[request] = by_request.get(request, 0.0) + sample.value
            elif sample.name in moved:
                moved[sample.name] += sample.value
    uploaded, downloaded = moved.values()
    return RequestCounts(seconds, by_request, uploaded, downloaded)
