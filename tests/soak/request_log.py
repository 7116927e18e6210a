"""Judging the request log of a proxy between sidecar and object store. Pure.

Owns what a key means and what may be asked about an abandoned one. Does not own the proxy.
"""

from collections.abc import Iterable
from urllib.parse import parse_qs

from tests.servers.proxy import Action, ProxiedRequest
from tests.servers.rocketmq import BROKER, CLUSTER
from tiered.formats.keys import archive_prefix

_PREFIX = f"{archive_prefix(CLUSTER, BROKER).rstrip('/')}/"


def archive_key(request: ProxiedRequest) -> str:
    """The key below the archive's prefix; empty for requests about something else."""
    return request.path.partition(_PREFIX)[2]


def is_data_put(request: ProxiedRequest) -> bool:
    """Whether it puts messages."""
    return request.method == "PUT" and archive_key(request).startswith(("data/", "sets/"))


def is_commit_put(request: ProxiedRequest) -> bool:
    """Whether it puts a catalog version."""
    return request.method == "PUT" and archive_key(request).startswith("catalog/")


def base_of(key: str) -> str:
    """What the attempts of one upload have in common: all of the key but epoch and attempt."""
    return key.rsplit("-", 2)[0]


def attempt_of(key: str) -> str:
    """Epoch and attempt: what the objects of one cycle's attempt have in common."""
    return "-".join(key.rpartition(".")[0].rsplit("-", 2)[1:])


def questions_about(abandoned: Iterable[str], requests: Iterable[ProxiedRequest]) -> list[str]:
    """Requests other than the one PUT that touch an abandoned key, or list where it would show."""
    keys = set(abandoned)
    asked = []
    for request in requests:
        key = archive_key(request)
        if key in keys and request.method != "PUT":
            asked.append(f"{request.method} {key}")
        prefix = parse_qs(request.query).get("prefix", [None])[0]
        if request.method == "GET" and prefix is not None:
            listed = prefix.partition(_PREFIX)[2]
            if any(one.startswith(listed) for one in keys):
                asked.append(f"LIST {prefix}")
    return asked


def failed_puts(requests: Iterable[ProxiedRequest]) -> dict[Action, list[ProxiedRequest]]:
    """Data PUTs that the proxy made fail, by how."""
    failed: dict[Action, list[ProxiedRequest]] = {}
    for request in requests:
        if is_data_put(request) and request.action is not Action.PASS:
            failed.setdefault(request.action, []).append(request)
    return failed
