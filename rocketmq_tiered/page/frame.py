"""The frame of every page: head, navigation, headers, and the files beside this module that it needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

from rocketmq_tiered.page.html import Child, Html, tag

STATIC = Path(__file__).parent / "static"
STATIC_TYPES = {
    "style.css": "text/css; charset=utf-8",
    "script.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HTML_TYPE = "text/html; charset=utf-8"
SECURITY_HEADERS = MappingProxyType({
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
})  # fmt: skip
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
