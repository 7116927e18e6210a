"""Every trouble is named everywhere within 30 seconds, with its cause and the next step; the table of what was said.

The troubles are made one after the other beside two brokers: those that harm a broker beside one, the others beside the
other, a few at a time. The table is $RESULTS_DIR/troubles.md.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene
from tests.integration.operator_view import SURFACES, OperatorView
from tests.integration.troubles import TROUBLES, Case, Trouble, case
from tests.servers.install import NotInstallableError
from tests.servers.prometheus import EVERY_S, Prometheus
from tests.servers.rocketmq import RocketMq
from tests.servers.running_store import RunningStore
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(5400)]

LIMIT_S = knob("TROUBLE_LIMIT_S", 30)
WATCHED_S = 90
AT_ONCE = 3
FIRES_S = 75
"""Alerts that wait a minute or less are watched until they fire."""
QUICK = (
    "TieredBlocked",
    "TieredFrozen",
    "TieredFenced",
    "TieredLogDiverged",
    "TieredGapRecorded",
    "TieredExpiryStopped",
)


@dataclass
class Row:
    """What was seen of one trouble. ``alert_s``: when its alert's condition held, and when it fired."""

    trouble: Trouble
    after_s: dict[str, float] = field(default_factory=dict)
    said: str = ""
    ready: str = ""
    exit_code: int | None = None
    alert_s: float | None = None
    fired_s: float | None = None
    missed: list[str] = field(default_factory=list)


def observed(trouble: Trouble, found: Case, prometheus: Prometheus) -> Row:
    """Make the trouble, and look until everything has named it."""
    row, name = Row(trouble), trouble.name
    trouble.prepare(found)
    prometheus.scrape(name, found.admin.removeprefix("http://"))
    if trouble.make is not None:
        found.sidecar.start()
        found.sidecar.wait_until_following(60)
        time.sleep(2 * EVERY_S)  # a healthy scrape before
    view = OperatorView(found.admin, found.sidecar.log)
    (trouble.make or _start)(found)
    if trouble.exit_code is not None:
        _await_end(row, found, view)
    elif trouble.ready:
        seen = view.until_named(trouble.signs, WATCHED_S)
        row.after_s, row.missed = seen.after_s, seen.missing()
        row.said, row.ready = seen.said.get("status", ""), seen.last["ready"].partition("\n")[0]
        _await_ready_code(row, view)
        step = re.search(trouble.signs.step, seen.last["status"])
        row.said += f" → {step.group()}" if step else ""
    else:
        _await_silence(row, found, view)
    _await_alert(row, view, prometheus)
    row.missed += [
        f"{surface} after {after_s:.0f} s" for surface, after_s in row.after_s.items() if after_s > LIMIT_S
    ]
    trouble.mend(found)
    prometheus.forget(name)
    return row


def _start(found: Case) -> None:
    found.sidecar.start()


def _await_ready_code(row: Row, view: OperatorView) -> None:
    """A broker that was restarted is compared first, so that the code may be another one for some seconds."""
    while not row.ready.startswith(str(row.trouble.ready)):
        if time.monotonic() - view.began_s > LIMIT_S:
            row.missed.append(f"/ready is {row.ready}")
            return
        time.sleep(0.5)
        row.ready = view.ready().partition("\n")[0]


def _await_end(row: Row, found: Case, view: OperatorView) -> None:
    """It ends with the code, and its last words name cause and next step."""
    assert found.sidecar.process is not None
    row.exit_code = found.sidecar.process.wait(WATCHED_S)
    ended_s = time.monotonic() - view.began_s
    row.after_s = {"log": ended_s, "ready": ended_s}
    text = found.sidecar.log.read_text("utf-8")
    if row.exit_code != row.trouble.exit_code:
        row.missed.append(f"exit code {row.exit_code}")
    for what, pattern in (("cause", row.trouble.signs.cause), ("next step", row.trouble.signs.step)):
        line = next((line for line in reversed(text.splitlines()) if re.search(pattern, line)), "")
        if not line:
            row.missed.append(f"no {what} in the log")
        elif what == "cause":
            cause = re.search(r'"cause":"((?:[^"\\]|\\.)*)"', line)
            row.said = cause.group(1) if cause else line
    row.ready = view.ready()
    _status_of_the_host(row, found)


def _await_silence(row: Row, found: Case, view: OperatorView) -> None:
    """Nothing answers: a probe and a scrape fail, `tiered status` says so."""
    while not view.ready().startswith("no answer"):
        assert time.monotonic() - view.began_s < WATCHED_S
    row.after_s = {"ready": time.monotonic() - view.began_s}
    row.ready = view.ready()
    _status_of_the_host(row, found)


def _status_of_the_host(row: Row, found: Case) -> None:
    begun_s = time.monotonic()
    done = found.sidecar.tiered("status", "--state-dir", str(found.directory / "state"), timeout_s=60)
    row.after_s["status"] = row.after_s["ready"] + time.monotonic() - begun_s
    row.said = row.said or done.stderr.strip().removeprefix("tiered: ")
    if done.returncode == 0:
        row.missed.append("tiered status finds it well")


def _await_alert(row: Row, view: OperatorView, prometheus: Prometheus) -> None:
    trouble = row.trouble
    while (now_s := time.monotonic() - view.began_s) < WATCHED_S + FIRES_S:
        alert = prometheus.alert(trouble.alert, trouble.name)
        if alert is not None:
            row.alert_s = now_s - alert.active_s if row.alert_s is None else row.alert_s
            row.fired_s = now_s if alert.is_firing else None
            if alert.is_firing or trouble.alert not in QUICK:
                break
        elif now_s > WATCHED_S:
            break
        time.sleep(1)
    if row.alert_s is None:
        row.missed.append(f"no {trouble.alert}")
    elif row.alert_s > LIMIT_S + 3 * EVERY_S:
        row.missed.append(f"{trouble.alert} after {row.alert_s:.0f} s")


class Troubles:
    """Brokers, MinIO and Prometheus for all of them."""

    def __init__(
        self, directory: Path, minio: RunningStore, prometheus: Prometheus, opened: ExitStack
    ) -> None:
        self._directory, self._minio, self._prometheus, self._opened = directory, minio, prometheus, opened

    def rows(self, troubles: Sequence[Trouble], name: str, at_once: int) -> Iterator[Row]:
        """The rows of ``troubles``, beside a broker of their own."""
        if not troubles:
            return
        config = {
            "mappedFileSizeCommitLog": 1 << 20,
            "mappedFileSizeConsumeQueue": 20 * 200,
            "deleteWhen": f"{(time.localtime().tm_hour + 12) % 24:02d}",
        }
        broker = RocketMq("5.3.3", self._directory / name, config)
        broker.start()
        self._opened.callback(broker.stop)
        broker.create_topic("live0", 4)
        load = Load(1 << 40, 1000, 2, per_second=100)
        self._opened.enter_context(Producer(broker, Scene(topics=1), load, self._directory / f"{name}.txt"))

        def one(trouble: Trouble) -> Row:
            place = self._directory / re.sub(r"\W+", "-", trouble.name)
            try:
                with case(place, broker, self._minio) as found:
                    row = observed(trouble, found, self._prometheus)
            except (AssertionError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                row = Row(trouble, missed=[f"not made: {error}"[-300:]])
            print(f"{trouble.name}: {row.missed or 'named everywhere'}", flush=True)
            return row

        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(one, troubles)


def table(rows: Sequence[Row]) -> str:
    """In Markdown; times in seconds."""
    head = ["trouble", *(f"{name} s" for name in SURFACES), "/ready", "alert", "what status says → next step"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        times = [f"{row.after_s[name]:.1f}" if name in row.after_s else "–" for name in SURFACES]
        ready = row.ready if row.exit_code is None else f"ended with {row.exit_code}"
        code = ready[:3] if row.exit_code is None and row.trouble.ready else ready
        alert = "–" if row.alert_s is None else f"{row.trouble.alert} {row.alert_s:.0f} s"
        fired = "" if row.fired_s is None else f", fires {row.fired_s:.0f} s"
        said = row.said.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {row.trouble.name} | {' | '.join(times)} | {code} | {alert}{fired} | {said} |")
    return "\n".join(lines) + "\n"


def test_no_trouble_looks_healthy(tmp_path: Path, minio_url: RunningStore) -> None:
    chosen = [one for one in TROUBLES if os.environ.get("SOAK_TROUBLES", "") in one.name]
    try:
        prometheus = Prometheus(tmp_path / "prometheus")
    except NotInstallableError as error:
        pytest.skip(f"Prometheus: {error}")
    with ExitStack() as opened:
        prometheus.server.start()
        opened.callback(prometheus.server.stop)
        troubles = Troubles(tmp_path, minio_url, prometheus, opened)
        with ThreadPoolExecutor(2) as both:
            harmful = both.submit(
                lambda: list(troubles.rows([one for one in chosen if one.harms_broker], "harmed", 1))
            )
            others = list(troubles.rows([one for one in chosen if not one.harms_broker], "shared", AT_ONCE))
        rows = [*others, *harmful.result()]
    results = Path(os.environ.get("RESULTS_DIR", "build/soak"))
    results.mkdir(parents=True, exist_ok=True)
    (results / "troubles.md").write_text(table(rows))
    missed = [f"{row.trouble.name}: {', '.join(row.missed)}" for row in rows if row.missed]
    times = [after_s for row in rows for after_s in row.after_s.values()]
    publish(
        "troubles",
        missed=[*missed, *limits(at_least_25_troubles=len(rows) >= 25 or len(chosen) < len(TROUBLES))],
        troubles=len(rows),
        named=len(rows) - len(missed),
        slowest_s=round(max(times, default=0), 1),
    )
