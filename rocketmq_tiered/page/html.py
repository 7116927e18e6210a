"""Builds HTML from values. Everything that is not Html is escaped, so no name, key or body can add markup. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, Union

from tiered.console import duration_text, printable, size_text, time_text

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


def document(
    title: str, process: str, archive: str, links: Sequence[tuple[str, str]], here: str, content: Child
) -> bytes:
    """A whole page. ``links``: (path, text) of the navigation; ``here``: the path of this one."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("title", f"{title} · {archive}"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="/page/icon.svg"),
        tag("link", rel="stylesheet", href="/page/style.css"),
        tag("script", src="/page/script.js", defer=True),
    )
    navigation = tag(
        "nav",
        [
            tag("a", text, href=path, aria_current="page" if path == here else None, class_="tab")
            for path, text in links
        ],
        aria_label="Pages",
    )
    header = tag(
        "header",
        tag("a", "Skip to content", href="#content", class_="skip"),
        tag(
            "div",
            tag("strong", process),
            tag("span", archive, class_="archive", title=archive),
            class_="brand",
        ),
        navigation,
    )
    body = tag(
        "body",
        header,
        tag("p", class_="notice", id="connection", role="alert", hidden=True),
        tag("main", tag("h1", title, class_="hidden"), content, id="content", tabindex="-1"),
    )
    return f"<!doctype html>{tag('html', head, body, lang='en')}".encode()


def notice(text: Child, *, is_problem: bool = True) -> Html:
    """A message above the content."""
    return tag("p", text, class_="notice bad" if is_problem else "notice", role="status")


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


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


Child: TypeAlias = Union[str, int, Sequence["Child"], None]  # noqa: UP007
Attribute: TypeAlias = str | int | bool | None
CELL_CHARS = 28
"""Longer text in a table wraps."""
_VOID = frozenset({"input", "link", "meta", "br"})


def markup(child: Child) -> str:
    """``child`` as markup. Control and bidirectional characters are shown as escapes, as in every command."""
    if isinstance(child, Html):
        return child
    if child is None:
        return ""
    if isinstance(child, str):
        return escape(printable(child))
    if isinstance(child, int):
        return str(child)
    return "".join(map(markup, child))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """One element. ``class_`` is written ``class`` and ``aria_label`` ``aria-label``; None and False are omitted."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        words.append(attribute if value is True else f'{attribute}="{escape(printable(str(value)))}"')
    start = f"<{' '.join(words)}>"
    return Html(start if name in _VOID else f"{start}{markup(children)}</{name}>")


def lines(text: str) -> Html:
    """Text of several lines, which keeps its line breaks and tabs."""
    kept = ("\t".join(map(printable, line.split("\t"))) for line in text.replace("\r\n", "\n").split("\n"))
    return Html(escape("\n".join(kept)))


def section(name: str, title: str, *children: Child, is_live: bool = True, note: Child = None) -> Html:
    """A part of a page with a heading. ``name``: its id. ``is_live``: script.js replaces it every few seconds."""
    heading = tag("h2", title, tag("small", note) if note else None, id=f"{name}-title")
    return tag("section", heading, children, id=name, aria_labelledby=f"{name}-title", data_live=is_live)


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[Child]], numeric: Sequence[int] = ()
) -> Html:
    """A table with a caption for screen readers. The first cell names its row. ``numeric``: columns aligned right."""
    heads = [tag("th", text, scope="col", class_=_side(i, numeric)) for i, text in enumerate(header)]
    body = [
        tag(
            "tr",
            [
                tag("td" if i else "th", _wrapped(cell), class_=_side(i, numeric), scope=None if i else "row")
                for i, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    whole = tag(
        "table",
        tag("caption", caption, class_="hidden"),
        tag("thead", tag("tr", heads)),
        tag("tbody", body),
    )
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _wrapped(cell: Child) -> Child:
    """Cells do not wrap, except long text."""
    is_long = isinstance(cell, str) and not isinstance(cell, Html) and len(cell) > CELL_CHARS
    return tag("span", cell, class_="name") if is_long else cell


def _side(column: int, numeric: Sequence[int]) -> str | None:
    return "n" if column in numeric else None


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names and values."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs], class_="facts")
