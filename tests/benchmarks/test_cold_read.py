"""How cold reads are judged, and what is read of the peer's answer."""

from __future__ import annotations

from typing import Any

from benchmarks.cold_read_report import summarize


def rows(
    rate: int = 900_000, cpu_us: float = 2.0, requests: float = 1.1, cold: int = 2, twice: float = 0.0
) -> list[dict[str, Any]]:
    """One run of one store: parts at 1 M messages/s, the peer at 100 k by default and 300 k at best."""
    common: dict[str, Any] = {"store": "B", "others_cores": 0.1}
    own = common | {"target": "file", "run": 0, "peak_rss_mib": 200}
    sequential = {
        "messages_per_s": rate,
        "cpu_us_per_message": cpu_us,
        "requests_of_ideal": requests,
        "requests_per_gib": 300,
        "fetched_twice": twice,
    }
    latency = {"p50_ms": 1.0, "p99_ms": 3.0, "cold_requests_max": cold, "warm_requests_max": 0}
    bare = {"p50_ms": 0.5, "p99_ms": 2.0}
    peer = common | {"what": "peer", "peak_rss_mib": 900}
    found = [
        own | {"what": "parts", "messages_per_s": 1_000_000, "cpu_us_per_message": 1.0, "bare_get": bare}
    ]
    found += [own | {"what": "ours", "read": read} | sequential for read in ("walk-1", "walk-16")]
    for read in ("seq-1", "seq-16"):
        found.append(own | {"what": "ours", "read": read} | sequential)
        found.append(peer | {"read": read, "messages_per_s": 100_000, "cpu_us_per_message": 14.0})
        found.append(
            peer | {"read": f"{read}-cache-off", "messages_per_s": 300_000, "cpu_us_per_message": 5.0}
        )
    found += [own | {"what": "ours", "read": read} | latency for read in ("random", "time")]
    return found


def test_everything_within_its_target_misses_nothing() -> None:
    (summary,) = summarize(rows())
    assert summary["missed"] == []
    assert summary["checks"]["seq-16 times peer's best"]["value"] == 3.0
    assert summary["checks"]["seq-1 times peer's default"]["value"] == 9.0
    assert summary["checks"]["seq-1 CPU of peer's"]["value"] == 0.4


def test_every_target_can_be_missed() -> None:
    (summary,) = summarize(rows(rate=450_000, cpu_us=3.0, requests=1.4, cold=3, twice=0.02))
    missed = set(summary["missed"])
    assert {"seq-1 of parts", "seq-16 times peer's best", "seq-16 times peer's default"} <= missed
    assert {"seq-1 CPU of peer's", "seq-1 requests of ideal"} <= missed
    assert {"walk-1 of parts", "walk-16 requests of ideal", "walk-16 bytes fetched twice"} <= missed
    assert {"random requests, cold", "time requests, cold"} <= missed
