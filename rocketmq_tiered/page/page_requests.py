"""Answers requests for pages: routes, who may see what, and how many at a time. Reads only."""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message as Headers
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl

from markupsafe import Markup

from fetcher.access import ArchiveAccess
from fetcher.rows.message import Message
from rocketmq_tiered.page.archive_view import SHORT_WAIT_S, ArchiveView, Contents
from rocketmq_tiered.page.clients import ReadFigures, render_clients
from rocketmq_tiered.page.html import (
    HTML_TYPE,
    SECURITY_HEADERS,
    STATIC_TYPES,
    date_text,
    failure,
    notice,
    render,
    static_file,
)
from rocketmq_tiered.page.kept_values import History, Measurement, Reading, Sampler
from rocketmq_tiered.page.messages import Search, find_messages, parse_search, render_messages
from rocketmq_tiered.page.overview import Overview, ShownHistory, render_overview
from rocketmq_tiered.page.settings_table import CurrentSettings, render_settings
from rocketmq_tiered.page.timers import ShownTimer, find_timers, render_timers
from rocketmq_tiered.page.topics import (
    TOPICS_A_PAGE,
    ShownTopic,
    page_number,
    parse_choice,
    render_queues,
    render_topics,
)
from rocketmq_tiered.process.admin import TEXT, PageAnswer
from rocketmq_tiered.process.findings import of_catalog, of_report
from rocketmq_tiered.process.report import QueueReport, StatusReport
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from rocketmq_tiered.server.listen.options import is_loopback
from rocketmq_tiered.server.proxy.relay_status import RelayStatus
from tiered.errors import NotFoundError, TieredError, UnavailableError, UsageError
from tiered.private_directory import check_trusted_file
from tiered.timestamps import wall_ms

logger = logging.getLogger(__name__)

CHARS_MIN, CHARS_MAX = 16, 1024
FAILURES_LOGGED_EVERY_S = 60.0
CHALLENGE = 'Basic realm="rocketmq-tiered", charset="UTF-8"'


def read_token(path: str) -> str:
    """The first line of the file; empty if no file is set. Raises UsageError without any content of the file."""
    if not path:
        return ""
    hint = f"write a line of {CHARS_MIN} characters or more to it, such as the output of openssl rand -hex 24"
    try:
        check_trusted_file(Path(path), "admin.token_file")
        with Path(path).open(encoding="utf-8") as file:
            token = file.readline(CHARS_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"admin.token_file = {path} cannot be read: {why}", hint=hint) from None
    if len(token) < CHARS_MIN:
        raise UsageError(f"admin.token_file = {path} has no token of {CHARS_MIN} characters", hint=hint)
    return token


class AccessToken:
    """Compares the token of requests. Thread-safe."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._lock = threading.Lock()
        self._failed, self._logged_s = 0, float("-inf")

    def is_in(self, authorization: str | None, client: str) -> bool:
        """Whether the header Authorization has the token. Wrong ones are counted, and logged with ``client``."""
        if authorization is None:
            return False
        if hmac.compare_digest(_password_in(authorization), self._token):
            return True
        self._log_failure(client)
        return False

    def _log_failure(self, client: str) -> None:
        """Counts a refused request, and logs the count at most every FAILURES_LOGGED_EVERY_S."""
        with self._lock:
            self._failed += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < FAILURES_LOGGED_EVERY_S:
                return
            count, self._failed, self._logged_s = self._failed, 0, now_s
        logger.warning("admin page refused: wrong token", extra={"client": client, "count": count})


def _password_in(authorization: str) -> bytes:
    """The password of Basic, or the token of Bearer; empty in anything else."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("utf-8", "replace")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


T = TypeVar("T")

PAGES_AT_ONCE, PAGES_WAITING, SEARCHES_AT_ONCE = 4, 4, 2
"""Pages in progress and waiting are fewer than the admin server's connections, so that /health is answered while they
wait for the object store."""
WAIT_S = 10.0
TARGET_CHARS_MAX = 8192
FIELDS_MAX = 20
_STATIC = "/page/"
_HIDDEN_MESSAGES = (
    "Clients need an account here, so messages are shown only with a token: set admin.token_file."
)
_BUSY = "all pages wait for the object store: try again"


@dataclass(frozen=True)
class Process:
    """What the pages show of their process. ``report`` and ``relays``: of `tiered run`; ``served``: of `tiered serve`.
    ``shows_clients``: whether it may serve clients. ``has_accounts``: whether clients need an account now."""

    title: str
    archive: str
    health: Callable[[], tuple[bool, str]]
    readiness: Callable[[], tuple[bool, str]]
    report: Callable[[], StatusReport | None] = lambda: None
    relays: Callable[[], Sequence[RelayStatus]] = tuple
    served: Callable[[], ArchiveStatus | None] = lambda: None
    serving: Callable[[], ArchiveAccess | None] = lambda: None
    shows_clients: bool = False
    has_accounts: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class _Page:
    """A page's title, content and code."""

    title: str
    content: Markup
    code: int = 200


class AdminPages:
    """Renders the pages of one process. Thread-safe. Starts to measure lag and connections at once. Raises UsageError
    for an unusable token file."""

    def __init__(self, process: Process, settings: CurrentSettings, archive: ArchiveView) -> None:
        """Makes the routes; a process without clients or without a gateway topic has no page of them."""
        admin = settings.settings.admin
        token = read_token(admin.token_file)
        self._token = AccessToken(token) if token else None
        self._is_open = is_loopback(admin.host)
        self._process, self._settings, self._archive = process, settings, archive
        self._started_ms = wall_ms()
        self._admitted = threading.BoundedSemaphore(PAGES_AT_ONCE + PAGES_WAITING)
        self._rendering = threading.BoundedSemaphore(PAGES_AT_ONCE)
        self._searching = threading.BoundedSemaphore(SEARCHES_AT_ONCE)
        self._history = History()
        self._sampler = Sampler(self._history, self._measured)
        self._routes: dict[str, tuple[str, Callable[[Mapping[str, str]], _Page]]] = {
            "/": ("Overview", self._overview),
            "/topics": ("Topics", self._topics),
            "/queues": ("", self._queues),
            "/messages": ("Messages", self._messages),
            "/timers": ("Timers", self._timers),
            "/clients": ("Clients", self._clients),
            "/settings": ("Settings", self._settings_page),
        }
        if not process.shows_clients:
            del self._routes["/clients"]
        if not settings.settings.timers.topic:
            del self._routes["/timers"]

    def close(self) -> None:
        """Stop measuring, and close the archive."""
        self._sampler.close()
        self._archive.close()

    # -- requests -----------------------------------------------------------------------------------------------

    def answer(self, target: str, headers: Headers, client: str) -> PageAnswer | None:
        """The page or static file at ``target``, a path with its query, or the refusal to show it; None if there is
        none. ``client``: the browser's address."""
        path, _, query = target.partition("?")
        name = path.removeprefix(_STATIC)
        if path not in self._routes and not (path.startswith(_STATIC) and name in STATIC_TYPES):
            return None
        refusal = self._refusal(headers, client)
        if refusal is not None:
            return refusal
        if path.startswith(_STATIC):
            return PageAnswer(200, STATIC_TYPES[name], static_file(name), SECURITY_HEADERS)
        if len(target) > TARGET_CHARS_MAX:
            return _text(414, "the address is too long")
        try:
            fields = dict(parse_qsl(query, max_num_fields=FIELDS_MAX))
        except ValueError:
            return _text(400, f"more than {FIELDS_MAX} fields")
        if not self._admitted.acquire(blocking=False):
            return _text(503, _BUSY)
        try:
            if not self._rendering.acquire(timeout=WAIT_S):
                return _text(503, _BUSY)
            try:
                return self._rendered(path, fields)
            finally:
                self._rendering.release()
        finally:
            self._admitted.release()

    def _refusal(self, headers: Headers, client: str) -> PageAnswer | None:
        """The refusal of requests without the token, and of those that other sites' pages make."""
        if headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate":
            return _text(403, "pages of other sites may not read this one")
        if self._token is not None:
            if self._token.is_in(headers.get("Authorization"), client):
                return None
            answer = _text(
                401, "this page needs the token in admin.token_file as password, with any user name"
            )
            return answer._replace(headers={**answer.headers, "WWW-Authenticate": CHALLENGE})
        if not self._is_open:
            return _text(403, "this page needs a token on an address beyond loopback: set admin.token_file")
        return None

    def _rendered(self, path: str, fields: Mapping[str, str]) -> PageAnswer:
        """The page at ``path`` in the frame that all pages have."""
        page = self._routes[path][1](fields)
        process = self._process
        links = [(place, text) for place, (text, _) in self._routes.items() if text]
        here = "/topics" if path == "/queues" else path
        body = render(
            "base",
            title=page.title,
            process=process.title,
            archive=process.archive,
            links=links,
            here=here,
            content=page.content,
        )
        return PageAnswer(page.code, HTML_TYPE, body.encode(), SECURITY_HEADERS)

    # -- pages --------------------------------------------------------------------------------------------------

    def _measured(self) -> Measurement:
        """The archive's lag and the number of connections at present, for the charts; nothing of a part that this
        process does not run."""
        process, found = self._process, dict[str, float | None]()
        report = process.report()
        if report is not None:
            names = ("lag_messages", "lag_bytes", "lag_seconds", "messages")
            found = {name: getattr(report, name) for name in names}
        served = process.served()
        if served is not None:
            found["connections"] = served.connections
        return found

    def _overview(self, _fields: Mapping[str, str]) -> _Page:
        """The first page: state of the process with cause and next step, charts, contents and cost of the archive,
        and findings."""
        process = self._process
        report, served = process.report(), process.served()
        (is_alive, alive), (is_ready, why) = process.health(), process.readiness()
        state = report.state if report is not None else why.partition(",")[0].partition(":")[0]
        if not is_alive:
            state, why = "not working", alive
        contents = self._archive.contents(SHORT_WAIT_S)
        cost = self._archive.cost(0.0 if contents.is_pending else SHORT_WAIT_S)
        findings = [] if report is None else of_report(report)
        if report is None and contents.value is not None:
            grace_ms = self._settings.settings.gc.grace_ms
            serving = process.serving()
            unreadable = () if serving is None else serving.fetcher.unreadable.ranges()
            findings = of_catalog(contents.value.state, wall_ms(), grace_ms, unreadable)
        facts = [("Started", date_text(self._started_ms))]
        if report is not None:
            facts.append(("Epoch", f"{report.epoch:,}"))
        cause, _, step = why.removeprefix(f"{state}: ").partition("\n")[0].partition(". Next: ")
        shown = Overview(
            state,
            cause,
            step,
            is_alive and is_ready,
            report,
            served,
            contents,
            cost,
            findings,
            self._history.points,
            self._histories(contents),
            facts,
        )
        return _Page("Overview", render_overview(shown))

    def _histories(self, contents: Reading[Contents]) -> list[ShownHistory]:
        """The log histories that were replaced, each with the time until which its messages are kept."""
        if contents.value is None or not contents.value.state.log_histories:
            return []
        grace_ms = self._settings.settings.gc.diverged_grace_ms
        return [
            ShownHistory(one, None if one.since_ms is None or one.is_kept else one.since_ms + grace_ms)
            for one in self._archive.histories().value or ()
        ]

    def _topics(self, fields: Mapping[str, str]) -> _Page:
        """A page of topics that match a pattern, in a chosen order: rule, oldest message, cost and lag of each."""
        choice, found = parse_choice(fields), self._archive.contents()
        contents = found.value
        if contents is None:
            return _Page("Topics", render("unread", found=found))
        chosen = contents.topics.chosen(choice.pattern, choice.order)
        first = choice.page * TOPICS_A_PAGE
        rows = [contents.topics.row(i) for i in chosen[first : first + TOPICS_A_PAGE]]
        cost = self._archive.cost().value
        oldest = self._archive.oldest_ms(contents, [row.topic for row in rows])
        lag: dict[str, int] = {}
        for queue in self._lag():
            lag[queue.topic] = lag.get(queue.topic, 0) + queue.lag_messages
        shown = [
            ShownTopic(
                row,
                contents.rules(row.topic),
                oldest.get(row.topic),
                None if cost is None else cost.topics.get(row.topic),
                lag.get(row.topic, 0),
            )
            for row in rows
        ]
        return _Page("Topics", render_topics(choice, shown, len(chosen), found))

    def _queues(self, fields: Mapping[str, str]) -> _Page:
        """The queues of one topic with their offsets and lag; 404 if it has none."""
        topic, found = fields.get("topic", ""), self._archive.contents()
        if found.value is None:
            return _Page("Queues", render("unread", found=found))
        lag = {queue.queue_id: queue.lag_messages for queue in self._lag() if queue.topic == topic}
        queues = self._archive.queues(topic)
        page = render_queues(topic, queues, lag, page_number(fields.get("page", "")), found)
        return _Page(topic or "Queues", page, 200 if queues else 404)

    def _lag(self) -> Sequence[QueueReport]:
        report = self._process.report()
        return () if report is None else report.queues

    def _messages(self, fields: Mapping[str, str]) -> _Page:
        """The search for messages, with its results. 403 if the broker has accounts and no token protects the pages."""
        if self._token is None and self._process.has_accounts():
            return _Page("Messages", notice(_HIDDEN_MESSAGES, is_problem=False), 403)
        contents = self._archive.contents().value
        search, code, problem = Search(), 200, Markup()
        found: list[Message] = []
        try:
            search = parse_search(fields)
            if search.is_given:
                found = self._searched(lambda: find_messages(self._archive.access(), search))
        except TieredError as error:
            problem, code = failure(error), _code_of(error)
        topics = () if contents is None else contents.topics.names
        form = fields.get("form", "text")
        return _Page("Messages", render_messages(search, topics, found, problem, form), code)

    def _timers(self, fields: Mapping[str, str]) -> _Page:
        """The pending timers, and those with the unique key that was entered. 403 for a key as for messages."""
        key, code, found = fields.get("key", "").strip(), 200, list[ShownTimer]()
        problem, counts = render("unread", found=self._archive.contents()), self._archive.timers()
        try:
            if key and self._token is None and self._process.has_accounts():
                problem, code = notice(_HIDDEN_MESSAGES, is_problem=False), 403
            elif key:
                topic = self._settings.settings.timers.topic
                found = self._searched(lambda: find_timers(self._archive.access(), topic, key))
        except TieredError as error:
            problem, code = failure(error), _code_of(error)
        now_ms = wall_ms()
        return _Page("Timers", render_timers(counts.value, now_ms, key, found, problem), code)

    def _searched(self, search: Callable[[], list[T]]) -> list[T]:
        if not self._searching.acquire(timeout=WAIT_S):
            raise UnavailableError("other searches are running", hint="try again")
        try:
            return search()
        finally:
            self._searching.release()

    def _clients(self, _fields: Mapping[str, str]) -> _Page:
        """The connected clients, what was relayed and served, and the figures of reading."""
        process, access = self._process, self._process.serving()
        figures = None
        if access is not None:
            prefetcher, readers = access.fetcher.prefetcher, access.fetcher.readers
            figures = ReadFigures(
                prefetcher.windows(),
                prefetcher.counters,
                access.source.statistics(),
                access.budget.total_bytes,
                len(readers),
            )
        return _Page("Clients", render_clients(process.relays(), process.served(), figures))

    def _settings_page(self, _fields: Mapping[str, str]) -> _Page:
        return _Page("Settings", render_settings(self._settings.loaded))


def _code_of(error: TieredError) -> int:
    if isinstance(error, NotFoundError):
        return 404
    return 400 if isinstance(error, UsageError) else 503


def _text(code: int, text: str) -> PageAnswer:
    return PageAnswer(code, TEXT, f"{text}\n".encode(), SECURITY_HEADERS)
