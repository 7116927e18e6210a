"""The result of a verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from tiered.archive.verify_segment import Anomaly, AnomalyKind
from tiered.catalog.holdings import REPAIR_HINT


@dataclass
class VerifyReport:
    """Result. ``leftovers``: keys without a reference, which only take space. ``counts``: objects checked, by kind.
    ``unchecked``: objects that could not be read now, with the reason."""

    anomalies: list[Anomaly] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)

    def add(self, kind: AnomalyKind, key: str, detail: str) -> None:
        """Record an anomaly of a whole object."""
        self.anomalies.append(Anomaly(kind, key, None, detail))

    def joined(self, found: Sequence[Anomaly]) -> VerifyReport:
        """This report with the anomalies ``found`` before the others."""
        return replace(self, anomalies=[*found, *self.anomalies])

    def lines(self, title: str) -> Iterator[str]:
        """The report as text: each anomaly, each leftover, then a summary that starts with ``title``."""
        yield from (f"anomaly: {anomaly}" for anomaly in self.anomalies)
        yield from (f"not checked: {key}: {reason}" for key, reason in self.unchecked.items())
        yield from (f"leftover: {key}" for key in self.leftovers)
        counts = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        count = len(self.anomalies)
        verdict = f"{count} {'ANOMALY' if count == 1 else 'ANOMALIES'}" if count else "clean"
        if self.unchecked:
            verdict += f", {len(self.unchecked)} NOT CHECKED"
        parts = verdict, counts, f"leftovers {len(self.leftovers)}"
        yield f"{title}: {'; '.join(part for part in parts if part)}"
        if count:
            yield f"next: {REPAIR_HINT}"
