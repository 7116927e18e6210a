"""What an operator of `tiered run` sees: status, /ready, metrics, admin page and log, and when each names a trouble.

Owns looking. Does not own making troubles (troubles.py) nor alerts.
"""

from __future__ import annotations

import html
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rocketmq_tiered.process.report import decode_report
from rocketmq_tiered.process.status_rows import headline

POLL_S = 0.5
SURFACES = ("status", "ready", "metric", "page", "log")


@dataclass(frozen=True)
class Signs:
    """What must be seen, as regular expressions. ``cause``: in status, /ready, page and log; ``step``: the next step,
    in status and page; ``metric``: a line of /metrics."""

    cause: str
    step: str
    metric: str


@dataclass
class OperatorView:
    """Looks at one sidecar, from now on. ``url``: of its admin port; ``log``: its log so far is not considered."""

    url: str
    log: Path
    began_s: float = field(default_factory=time.monotonic)
    _log_begin: int = field(default=0)

    def __post_init__(self) -> None:
        self._log_begin = self.log.stat().st_size if self.log.exists() else 0

    def texts(self) -> dict[str, str]:
        """Each surface now; empty for one that does not answer."""
        status = _fetched(f"{self.url}/status.json")
        return {
            "status": _of_status(status),
            "ready": self.ready(),
            "metric": _fetched(f"{self.url}/metrics"),
            "page": _plain(_fetched(f"{self.url}/")),
            "log": self.logged(),
        }

    def ready(self) -> str:
        """Code and text of /ready."""
        return _fetched(f"{self.url}/ready")

    def logged(self) -> str:
        """The log since the beginning: its lines of level warning and above, and of states."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as opened:
            opened.seek(self._log_begin)
            lines = opened.read().decode("utf-8", "replace").splitlines()
        return "\n".join(line for line in lines if '"level":"info"' not in line or '"message":"state' in line)

    def until_named(self, signs: Signs, timeout_s: float, also: Callable[[], bool] = lambda: True) -> Seen:
        """When each surface named the trouble first, and what it said then. Ends when all have, and ``also``."""
        wanted = {name: signs.metric if name == "metric" else signs.cause for name in SURFACES}
        seen = Seen()
        while True:
            texts = self.texts()
            now_s = time.monotonic() - self.began_s
            for name, pattern in wanted.items():
                found = re.search(pattern, texts[name])
                if found is not None and name not in seen.after_s:
                    seen.after_s[name] = now_s
                    seen.said[name] = _line_of(texts[name], found)
            seen.has_step = seen.has_step or all(
                re.search(signs.step, texts[name]) for name in ("status", "page")
            )
            seen.last = texts
            if (len(seen.after_s) == len(SURFACES) and seen.has_step and also()) or now_s > timeout_s:
                return seen
            time.sleep(POLL_S)


@dataclass
class Seen:
    """``after_s``: seconds until a surface named the trouble; absent if it never did. ``said``: its line then."""

    after_s: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    last: Mapping[str, str] = field(default_factory=dict)
    has_step: bool = False

    def missing(self) -> list[str]:
        """Surfaces that never named it."""
        return [name for name in SURFACES if name not in self.after_s] + (
            [] if self.has_step else ["next step"]
        )


def _fetched(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return f"no answer: {getattr(error, 'reason', error)}"


def _of_status(text: str) -> str:
    """As `tiered status` begins."""
    code, _, body = text.partition(" ")
    return "\n".join(headline(decode_report(json.loads(body)))) if code == "200" else text


def _plain(text: str) -> str:
    without = re.sub(r"<(style|script|svg)\b.*?</\1>|<[^>]+>", " ", text, flags=re.DOTALL)
    return re.sub(r"[ \t]*\n\s*|\s{2,}", "\n", html.unescape(without))


def _line_of(text: str, found: re.Match[str]) -> str:
    begin = text.rfind("\n", 0, found.start()) + 1
    end = text.find("\n", found.end())
    return text[begin : end if end >= 0 else len(text)].strip()
