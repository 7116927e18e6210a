"""Renders the templates of the page. Whatever is not Markup is escaped, so no name, key or body can add markup."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tiered.console import counted, duration_text, printable, size_text, time_text
from tiered.errors import NotFoundError, TieredError
from tiered.model.queue import QueueKey

STATIC = Path(__file__).parent / "static"
STATIC_TYPES = {
    "style.css": "text/css; charset=utf-8",
    "script.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HTML_TYPE = "text/html; charset=utf-8"
SECURITY_HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
)
"""Nothing is loaded from elsewhere, inline, or into a foreign page; nothing is stored."""


@cache
def static_file(name: str) -> bytes:
    """A file of the page."""
    return (STATIC / name).read_bytes()


def render(template: str, **values: Any) -> Markup:
    """The template of this name with ``values``."""
    # The template has escaped every value.
    return Markup(_templates().get_template(f"{template}.html").render(values))  # nosec B704


@cache
def _templates() -> Environment:
    """Return Jinja's environment, which loads the templates, with our filters that write counts, sizes, times and
    costs. A value that a template names and does not get is an error."""
    environment = Environment(
        loader=FileSystemLoader(STATIC.with_name("templates")),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": count_text,
        "counted": counted,
        "date": date_text,
        "lines": _lines,
        "money": money_text,
        "quoted": partial(quote, safe=""),
        "rate": rate_text,
        "seconds": seconds_text,
        "share": share_text,
        "size": bytes_text,
    }
    environment.globals |= {"message_path": message_path}
    return environment


def _shown(value: Any) -> Any:
    """Control and bidirectional characters are shown as escapes, as in every command; None as nothing."""
    if isinstance(value, Markup):
        return value
    return printable(value) if isinstance(value, str) else "" if value is None else value


def _lines(text: str) -> Markup:
    """Text of several lines, which keeps its line breaks and tabs."""
    kept = ("\t".join(map(printable, line.split("\t"))) for line in text.replace("\r\n", "\n").split("\n"))
    return escape("\n".join(kept))


def notice(text: str, *, is_problem: bool = True) -> Markup:
    """A message above the content."""
    kind = "notice bad" if is_problem else "notice"
    return Markup('<p class="{}" role="status">{}</p>').format(kind, printable(text))


def failure(error: TieredError) -> Markup:
    """A message that a search found nothing, or why it failed."""
    return notice(str(error), is_problem=not isinstance(error, NotFoundError))


def message_path(queue: QueueKey, offset: int, **others: object) -> str:
    """Return the path of the page that shows the message at ``offset`` of ``queue``. ``others``: more query fields."""
    fields = {
        "by": "offset",
        "topic": queue.topic,
        "queue": queue.queue_id,
        "generation": queue.generation,
        "value": offset,
    }
    return f"/messages?{urlencode(fields | others)}"


UNKNOWN = "–"


def count_text(value: float | None) -> str:
    """``12,345``."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def bytes_text(value: float | None) -> str:
    """``1.5 MiB``."""
    return UNKNOWN if value is None else size_text(value)


def seconds_text(value: float | None) -> str:
    """``3m 20s``."""
    return UNKNOWN if value is None else duration_text(value)


def rate_text(value: float | None) -> str:
    """``1,200 /s``."""
    return UNKNOWN if value is None else f"{value:,.0f} /s"


def money_text(value: float | None, currency: str) -> str:
    """``0.12 USD``."""
    if value is None:
        return UNKNOWN
    return f"< 0.01 {currency}" if 0 < value < 0.01 else f"{value:,.2f} {currency}"


def date_text(time_ms: int | None) -> str:
    """``2026-11-23 21:00:00``, UTC."""
    return UNKNOWN if not time_ms else time_text(time_ms).replace("T", " ").removesuffix("Z")


def share_text(part: float, whole: float) -> str:
    """``97.5 %``."""
    return f"{100 * part / whole:.1f} %" if whole else UNKNOWN


WIDTH, HEIGHT = 240, 48
SPAN_MIN_S = 300.0
Point = tuple[float, float]
"""Age in seconds, and the value then."""


def sparkline(
    name: str, points: Sequence[Point], text_of: Callable[[float], str], present: float | None = None
) -> Markup:
    """Return a small chart of the figure ``name``, drawn from zero to its largest value. ``points`` are (age in
    seconds, value) from old to new; ``present`` is the value now. The chart spans the age of the oldest point, and at
    least SPAN_MIN_S. ``text_of`` writes a value."""
    points = points if present is None else [*points, (0.0, present)]
    if not points:
        return Markup('<p class="spark none">This figure was not measured yet.</p>')
    span_s = max(SPAN_MIN_S, points[0][0])
    highest = max(value for _, value in points)
    scale = highest or 1.0  # all values may be 0
    coordinates = [
        (WIDTH * (1 - age_s / span_s), (HEIGHT - 2) * (1 - max(0.0, value) / scale) + 1)
        for age_s, value in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)
    area = f"{coordinates[0][0]:.1f},{HEIGHT} {line} {coordinates[-1][0]:.1f},{HEIGHT}"
    minutes = round(span_s / 60)
    caption = f"{minutes} min, highest {text_of(highest)}"
    return Markup(
        '<div class="spark"><svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}, last {} min: now {}, highest {}"><polygon points="{}"></polygon>'
        '<polyline points="{}"></polyline></svg><p aria-hidden="true">{}</p></div>'
    ).format(WIDTH, HEIGHT, name, minutes, text_of(points[-1][1]), text_of(highest), area, line, caption)
