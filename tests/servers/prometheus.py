"""A Prometheus with this project's alerts, that scrapes sidecars by name."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.servers.child import ChildServer, answers, free_port
from tests.servers.install import NotInstallableError

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
EVERY_S = 5
_CONFIG = f"""global: {{scrape_interval: {EVERY_S}s, evaluation_interval: {EVERY_S}s}}
rule_files: ["{RULES}"]
scrape_configs:
  - job_name: rocketmq-tiered
    file_sd_configs: [{{files: ["targets.json"], refresh_interval: 1s}}]
"""


@dataclass
class Prometheus:
    """Scrapes and evaluates every EVERY_S."""

    directory: Path
    _targets: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise NotInstallableError("prometheus is not on PATH")
        self.directory.mkdir(parents=True)
        (self.directory / "prometheus.yml").write_text(_CONFIG)
        self._write()
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        command = [
            program,
            f"--config.file={self.directory}/prometheus.yml",
            f"--web.listen-address={address}",
            f"--storage.tsdb.path={self.directory}/data",
        ]
        log = self.directory / "prometheus.log"
        self.server = ChildServer("Prometheus", command, {}, log, lambda: answers(f"{self._url}/-/ready"))

    def scrape(self, name: str, address: str) -> None:
        """Scrape ``address`` (host:port) from now on, as instance ``name``."""
        with self._lock:
            self._targets[name] = address
            self._write()

    def forget(self, name: str) -> None:
        """Scrape it no longer."""
        with self._lock:
            self._targets.pop(name, None)
            self._write()

    def _write(self) -> None:
        groups = [
            {"targets": [address], "labels": {"instance": name}} for name, address in self._targets.items()
        ]
        path = self.directory / "targets.json"
        path.with_suffix(".new").write_text(json.dumps(groups))
        path.with_suffix(".new").rename(path)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that PromQL finds now."""
        form = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{form}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def alert(self, name: str, instance: str) -> Alert | None:
        """An alert of one instance; None while it is inactive."""
        with urllib.request.urlopen(f"{self._url}/api/v1/alerts", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["alerts"]
        for alert in found:
            if alert["labels"]["alertname"] == name and alert["labels"].get("instance") == instance:
                text = alert["activeAt"][:26].rstrip("Z")
                active = datetime.fromisoformat(f"{text}+00:00").timestamp()
                return Alert(time.time() - active, alert["state"] == "firing")
        return None


@dataclass(frozen=True)
class Alert:
    """``active_s``: for how long its condition holds."""

    active_s: float
    is_firing: bool
