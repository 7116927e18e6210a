"""Draws a series of measurements as a small SVG. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocketmq_tiered.page.html import Html, tag

WIDTH, HEIGHT = 240, 48
SPAN_MIN_S = 300.0
Point = tuple[float, float]
"""Age in seconds, and the value then."""


def sparkline(
    name: str, points: Sequence[Point], text_of: Callable[[float], str], present: float | None = None
) -> Html:
    """``points`` from old to new, then ``present``, from zero to their largest. The span is theirs, but at least
    SPAN_MIN_S."""
    points = points if present is None else [*points, (0.0, present)]
    if not points:
        return tag("p", "no measurement yet", class_="spark none")
    span_s = max(SPAN_MIN_S, points[0][0])
    top = max(value for _, value in points)
    scale = top or 1.0
    placed = [
        (WIDTH * (1 - age_s / span_s), (HEIGHT - 2) * (1 - max(0.0, value) / scale) + 1)
        for age_s, value in points
    ]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    area = f"{placed[0][0]:.1f},{HEIGHT} {drawn} {placed[-1][0]:.1f},{HEIGHT}"
    minutes = round(span_s / 60)
    label = f"{name}, last {minutes} min: now {text_of(points[-1][1])}, highest {text_of(top)}"
    picture = tag(
        "svg",
        tag("polygon", points=area),
        tag("polyline", points=drawn),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    scale_text = f"{minutes} min, highest {text_of(top)}"
    return tag("div", picture, tag("p", scale_text, aria_hidden="true"), class_="spark")
