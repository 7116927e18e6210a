"""Reads the request counters of the running instance that writes an archive, from its metrics."""

import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rocketmq_tiered.maintenance.cost import RequestCounts
from rocketmq_tiered.process.admin_client import fetch_metrics
from rocketmq_tiered.process.instance import InstanceDescription, running_instance, running_instances
from rocketmq_tiered.process.metrics import PREFIX
from tiered.errors import NotFoundError, UnavailableError


def instance_of(
    root: Path, state_dir: str, url: str, cluster: str, broker: str
) -> InstanceDescription | None:
    """The instance on this host that writes the archive of ``cluster`` and ``broker`` below ``url``; None if none runs.
    Only the one with ``state_dir`` counts, if that is given, else all whose state directories are below ``root``."""
    try:
        running: Iterable[InstanceDescription] = (
            [running_instance(Path(state_dir))] if state_dir else running_instances(root)
        )
    except NotFoundError:
        return None
    wanted = (url.rstrip("/"), cluster, broker)
    for instance in running:
        if (instance.archive_url.rstrip("/"), instance.cluster, instance.broker) == wanted:
            return instance
    return None


def read_counts(instance: InstanceDescription) -> RequestCounts | None:
    """How many requests ``instance`` has sent to the object store since its start, by its metrics; None if it does not
    answer."""
    try:
        text = fetch_metrics(instance.admin_url)
    except UnavailableError:
        return None
    return counts_in(text, time.time() - instance.started_ms / 1000)


def counts_in(metrics: str, seconds: float) -> RequestCounts:
    """The requests and bytes to the object store that ``metrics``, in Prometheus' text format, count for a process that
    has run for ``seconds``. Pure."""
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
