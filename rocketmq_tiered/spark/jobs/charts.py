"""SVG charts: stacked columns over time, horizontal bars, histograms. Pure, no libraries.

Colours are CSS classes ``s0`` … ``s6``, so that charts follow the page's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from tiered.model.dates import DATES_BEGIN_MS, DATES_END_MS

WIDTH = 960
SERIES_MAX = 7
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_COLUMNS_MIN = 12
"""Minimum number of columns in the width, so that a single one does not fill the chart."""


@dataclass(frozen=True)
class Series:
    """One colour: its name and a value for each column."""

    name: str
    values: Sequence[float]


def stacked_columns(times_ms: Sequence[int], width_ms: int, series: Sequence[Series], unit: str) -> str:
    """Stacked columns over time, one for each of ``times_ms`` (start of a bucket of ``width_ms``)."""
    height = 260
    if not times_ms:
        return ""
    first, last = times_ms[0], max(times_ms[-1] + width_ms, times_ms[0] + _COLUMNS_MIN * width_ms)
    totals = [sum(one.values[i] for one in series) for i in range(len(times_ms))]
    ticks = nice_ticks(max(totals, default=0.0))
    top = ticks[-1] or 1.0
    plot_w, plot_h = WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    scale_x = plot_w / max(last - first, 1)
    column = max(width_ms * scale_x - 1.0, 0.8)
    parts = [_axis_y(ticks, plot_h, unit)]
    for i, begin in enumerate(times_ms):
        x, y = _LEFT + (begin - first) * scale_x, float(_TOP + plot_h)
        for number, one in enumerate(series):
            bar = one.values[i] / top * plot_h
            if bar <= 0:
                continue
            y -= bar
            title = f"{one.name}, {time_label(begin, width_ms)}: {short(one.values[i])} {unit}"
            parts.append(
                f'<rect class="s{number}" x="{x:.1f}" y="{y:.1f}" width="{column:.1f}" height="{max(bar, 0.5):.1f}">'
                f"<title>{escape(title)}</title></rect>"
            )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + plot_w * share
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        label = time_label(int(first + (last - first) * share), width_ms)
        parts.append(f'<text class="t" x="{x:.0f}" y="{height - 8}" text-anchor="{anchor}">{label}</text>')
    return _svg(height, parts)


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: (name, value, text beside the bar)."""
    if not rows:
        return ""
    line, label_w, text_w = 24, 300, 190
    most = max(value for _, value, _ in rows) or 1.0
    parts = []
    for number, (name, value, text) in enumerate(rows):
        y = number * line
        length = max(value / most * (WIDTH - label_w - text_w), 1.0)
        shown = name if len(name) <= 40 else f"{name[:39]}…"
        parts.append(
            f'<text class="n" x="{label_w - 10}" y="{y + 16}" text-anchor="end">{escape(shown)}'
            f"<title>{escape(name)}</title></text>"
            f'<rect class="s0" x="{label_w}" y="{y + 4}" width="{length:.1f}" height="{line - 8}" rx="2"/>'
            f'<text class="t" x="{label_w + length + 8:.1f}" y="{y + 16}">{escape(text)}</text>'
        )
    return _svg(len(rows) * line, parts)


def histogram(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """Labelled columns."""
    height = 220
    if not rows:
        return ""
    ticks = nice_ticks(max(value for _, value in rows))
    top = ticks[-1] or 1.0
    plot_w, plot_h = WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    step = plot_w / max(len(rows), _COLUMNS_MIN)
    parts = [_axis_y(ticks, plot_h, unit)]
    for number, (label, value) in enumerate(rows):
        bar = value / top * plot_h
        x = _LEFT + number * step
        parts.append(
            f'<rect class="s1" x="{x + step * 0.1:.1f}" y="{_TOP + plot_h - bar:.1f}" width="{step * 0.8:.1f}" '
            f'height="{max(bar, 0.5):.1f}"><title>{escape(label)}: {short(value)} {unit}</title></rect>'
            f'<text class="t" x="{x + step / 2:.1f}" y="{height - 8}" text-anchor="middle">{escape(label)}</text>'
        )
    return _svg(height, parts)


def legend(names: Sequence[str]) -> str:
    """Names beside their colours."""
    return "".join(
        f'<span class="key"><svg width="12" height="12"><rect class="s{number}" width="12" height="12" rx="2"/></svg>'
        f"{escape(name)}</span>"
        for number, name in enumerate(names)
    )


def nice_ticks(most: float) -> list[float]:
    """0 … a round number of at least ``most``, in three to six steps."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 4
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def short(value: float) -> str:
    """``1,234``, ``12.3 k``, ``4.5 M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.1f} {unit}".replace(".0 ", " ")
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def time_label(time_ms: int, width_ms: int) -> str:
    """UTC, with the precision of ``width_ms``. Times outside Python's dates, from damaged records, in ms."""
    if not DATES_BEGIN_MS <= time_ms <= DATES_END_MS:
        return f"{time_ms} ms"
    at = datetime.fromtimestamp(time_ms / 1000, UTC)
    if width_ms >= 86_400_000:
        return f"{at:%Y-%m-%d}"
    if width_ms >= 60_000:
        return f"{at:%m-%d %H:%M}"
    return f"{at:%H:%M:%S}" if width_ms >= 1000 else f"{at:%H:%M:%S}.{time_ms % 1000:03d}"


def _axis_y(ticks: Sequence[float], plot_h: float, unit: str) -> str:
    top = ticks[-1] or 1.0
    lines = []
    for tick in ticks:
        y = _TOP + plot_h - tick / top * plot_h
        lines.append(
            f'<line class="g" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="t" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    return "".join(lines) + f"<title>{escape(unit)}</title>"


def _svg(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )
