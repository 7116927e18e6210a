"""Figures that are not known are the last known ones with their age, also after a restart; never zeros."""

from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.process.findings import of_report
from rocketmq_tiered.process.known_figures import KnownFigures
from rocketmq_tiered.process.lag import Lag, QueueLag
from rocketmq_tiered.process.metrics import status_families
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.process.status_rows import status_lines
from tests.process.status_report import REPORT
from tiered.clock import Clock

PLACE = (REPORT.archive_url, REPORT.cluster, REPORT.broker)
KNOWN = replace(
    REPORT,
    committed_phys=500,
    bound_phys=900,
    lag_bytes=400,
    lag_seconds=30.0,
    retention_margin_seconds=7200.0,
)
UNKNOWN = StatusReport(state="blocked: object store")
NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000


def figures(directory: Path, now_ms: int, place: tuple[str, str, str] = PLACE) -> KnownFigures:
    return KnownFigures(directory, place, clock=Clock(wall_ms=lambda: now_ms))


def test_a_start_during_an_outage_shows_what_was_known_before_it_and_its_age(tmp_path: Path) -> None:
    assert figures(tmp_path, NOW_MS).completed(UNKNOWN) == UNKNOWN
    lines = dict(status_lines(UNKNOWN))
    assert lines["archived"].startswith("unknown of unknown") and "unknown" in lines["behind"]
    assert figures(tmp_path, NOW_MS).completed(KNOWN) is KNOWN

    shown = figures(tmp_path, NOW_MS + HOUR_MS).completed(UNKNOWN)
    assert (shown.state, shown.committed_phys, shown.lag_bytes, shown.lag_seconds) == (
        UNKNOWN.state,
        500,
        400,
        3630.0,
    )
    assert shown.retention_margin_seconds == 3600.0 and shown.measured_seconds == 3600.0
    assert dict(status_lines(shown))["archived"].endswith("(measured 1h 00m ago)")
    samples = {
        sample.name.removeprefix("rocketmq_tiered_store_"): sample.value
        for family in status_families(shown)
        for sample in family.samples
    }
    assert samples["behind_bytes"] == 400 and samples["dispatch_offset"] == 500
    assert samples["retention_margin_seconds"] == samples["figures_age_seconds"] == 3600


def test_figures_of_another_archive_and_damaged_files_are_not_known(tmp_path: Path) -> None:
    figures(tmp_path, NOW_MS).completed(KNOWN)
    assert figures(tmp_path, NOW_MS, ("file:///other", "c", "b")).completed(UNKNOWN) == UNKNOWN
    next(tmp_path.iterdir()).write_bytes(b"{")
    assert figures(tmp_path, NOW_MS).completed(UNKNOWN) == UNKNOWN


def test_a_message_from_the_future_shows_a_wrong_clock_instead_of_an_age() -> None:
    lag = Lag({("t", 0): QueueLag(3, 300, NOW_MS)})
    assert lag.ages(NOW_MS + HOUR_MS) == {"lag_seconds": 3600.0, "clock_off_seconds": 0.0}
    report = replace(REPORT, **lag.ages(NOW_MS - HOUR_MS))
    assert report.lag_seconds is None and "unknown" in dict(status_lines(report))["behind"]
    assert "1h 00m in the future" in next(one.what for one in of_report(report) if one.about == "clock")
