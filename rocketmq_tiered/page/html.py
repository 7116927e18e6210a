"""Builds HTML from values. Everything that is not Html is escaped, so no name, key or body can add markup. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias, Union

from tiered.console import printable


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


def joined(children: Iterable[Child]) -> Html:
    """Several children, one after the other."""
    return Html("".join(map(markup, children)))


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
