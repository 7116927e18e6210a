"""How serving is judged, and what the bare client sends and measures."""

from typing import Any

import pytest

from benchmarks.serving_client import pull_frame
from benchmarks.serving_report import figures, summarize, table
from tiered.remoting.command import FrameDecoder, SerializeType


def read(server: str, messages: int, cpu_s: float, p99_us: float | None = 500.0) -> dict[str, Any]:
    """Two seconds of one client."""
    return figures(
        {
            "what": "read",
            "client": "bare",
            "queues": 1,
            "server": server,
            "messages": messages,
            "seconds": 2.0,
            "server_cpu_s": cpu_s,
            "p50_us": 100.0,
            "p99_us": p99_us,
        }
    )


SLOW = {"what": "slow", "queues": 4, "closed": 0, "peak_rss_bytes": 300 << 20, "budget_bytes": 400 << 20}


@pytest.mark.parametrize(
    ("warm", "cold", "missed"),
    [
        (read("warm", 400_000, 1.2), read("cold", 300_000, 2.0), []),
        (read("warm", 399_000, 1.0), read("cold", 390_000, 1.0), ["warm_rate_of_broker"]),
        (read("warm", 400_000, 1.3), read("cold", 400_000, 1.0), ["warm_cpu_of_broker"]),
        (read("warm", 400_000, 1.0), read("cold", 279_000, 1.0), ["cold_rate_of_warm"]),
        (read("warm", 400_000, 1.0, 1001.0), read("cold", 400_000, 1.0), ["warm_p99_of_broker"]),
        (read("warm", 400_000, 1.0, None), read("cold", 400_000, 1.0), []),
    ],
)
def test_targets(warm: dict[str, Any], cold: dict[str, Any], missed: list[str]) -> None:
    (summary,) = summarize([read("broker", 400_000, 1.2), warm, cold])
    assert summary["missed"] == missed
    assert ("MISSED" in table([summary])) is bool(missed)


@pytest.mark.parametrize(("peak_mib", "missed"), [(300, []), (401, ["peak_rss_mib"])])
def test_slow_connections_stay_within_the_budget(peak_mib: int, missed: list[str]) -> None:
    (summary,) = summarize([SLOW | {"peak_rss_bytes": peak_mib << 20}])
    assert summary["missed"] == missed


@pytest.mark.parametrize("kind", list(SerializeType))
def test_the_bare_clients_pull_is_one_frame(kind: SerializeType) -> None:
    (command,) = FrameDecoder().feed(pull_frame("t", 3, 640, 32, kind))
    assert (command.code, command.serialize_type) == (11, kind)
    assert (command.ext_fields["queueId"], command.ext_fields["queueOffset"]) == ("3", "640")
