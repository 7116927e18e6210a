"""Answers requests for pages: routes, who may see what, and how many at a time. Reads only."""

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
from rocketmq_tiered.page.kept_values import History, Measurement, Reading
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
    """Return the token in the first line of the file that admin.token_file names; empty if no file is set. Raises
    UsageError for a file that cannot be read or has no token; the error shows nothing of the file's content."""
    if not path:
        return ""
    hint = f"write a line of {CHARS_MIN} characters or more to this file, such as the output of openssl rand -hex 24"
    try:
        check_trusted_file(Path(path), "admin.token_file")
        with Path(path).open(encoding="utf-8") as file:
            token = file.readline(CHARS_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"admin.token_file = {path} cannot be read: {why}", hint=hint) from None
    if len(token) < CHARS_MIN:
        raise UsageError(
            f"admin.token_file = {path}: the file's first line has fewer than {CHARS_MIN} characters",
            hint=hint,
        )
    return token


class AccessToken:
    """Compares the token of requests. Thread-safe."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._lock = threading.Lock()
        self._failed, self._logged_s = 0, float("-inf")

    def is_in(self, authorization: str | None, client: str) -> bool:
        """Return whether ``authorization``, the header of a request, has the token; None: there was no such header.
        Wrong tokens are counted, and logged with the address ``client``."""
        if authorization is None:
            return False
        if hmac.compare_digest(_password_in(authorization), self._token):
            return True
        self._log_failure(client)
        return False

    def _log_failure(self, client: str) -> None:
        """Count a request with a wrong token, and log how many there were at most every FAILURES_LOGGED_EVERY_S."""
        with self._lock:
            self._failed += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < FAILURES_LOGGED_EVERY_S:
                return
            count, self._failed, self._logged_s = self._failed, 0, now_s
        logger.warning(
            "a request for the admin page was refused, as its token is wrong",
            extra={"client": client, "count": count},
        )


def _password_in(authorization: str) -> bytes:
    """Return the token that a header Authorization carries: the password of the scheme Basic, or all of Bearer. It is
    empty for other schemes and for a header that does not parse."""
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
_BUSY = "the pages that were requested before are still waiting for the object store: try again later"


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
        """``process``: what the pages show; ``archive``: how they read the archive. A process that serves no clients
        has no page of them, and one without a gateway topic has none of timers."""
        admin = settings.settings.admin
        token = read_token(admin.token_file)
        self._token = AccessToken(token) if token else None
        self._is_open = is_loopback(admin.host)  # without a token, only users of this machine see the pages
        self._process, self._settings, self._archive = process, settings, archive
        self._started_ms = wall_ms()
        self._admitted = threading.BoundedSemaphore(PAGES_AT_ONCE + PAGES_WAITING)
        self._rendering = threading.BoundedSemaphore(PAGES_AT_ONCE)
        self._searching = threading.BoundedSemaphore(SEARCHES_AT_ONCE)
        self._history = History(self._measured)
        self._history.start()
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
        self._history.close()
        self._archive.close()

    # -- requests -----------------------------------------------------------------------------------------------

    def answer(self, target: str, headers: Headers, client: str) -> PageAnswer | None:
        """Return the page or static file at ``target``, a path with its query, or the refusal to show it; None if there
        is none. ``client``: the browser's address. A page waits while others are being made, and is refused with 503 if
        too many wait already."""
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
            return _text(414, f"the address of this page is longer than {TARGET_CHARS_MAX:,} characters")
        try:
            fields = dict(parse_qsl(query, max_num_fields=FIELDS_MAX))
        except ValueError:
            return _text(400, f"the query of this address has more than {FIELDS_MAX} fields")
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
        """Return the refusal of a request without the token, or of one that a page of another site makes; None: the
        request may see the page."""
        # Following a link from another site is no such request.
        if headers.get("Sec-Fetch-Site") == "cross-site" and headers.get("Sec-Fetch-Mode") != "navigate":
            return _text(403, "a page of another site may not read the admin page")
        if self._token is not None:
            if self._token.is_in(headers.get("Authorization"), client):
                return None
            answer = _text(
                401, "the admin page needs the token in admin.token_file as password, with any user name"
            )
            return answer._replace(headers={**answer.headers, "WWW-Authenticate": CHALLENGE})
        if not self._is_open:
            return _text(
                403,
                "the admin page listens on an address that others can reach, so it needs a token: set"
                " admin.token_file",
            )
        return None

    def _rendered(self, path: str, fields: Mapping[str, str]) -> PageAnswer:
        """Return the page at ``path`` for the fields of its query, in the frame with title and links that all pages
        have."""
        page = self._routes[path][1](fields)
        process = self._process
        links = [(link_path, text) for link_path, (text, _) in self._routes.items() if text]
        here = "/topics" if path == "/queues" else path  # the link that is marked as the present page
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
        """Return the present figures for the charts: the archive's lag and its messages if this process archives, and
        the number of connections if it serves clients."""
        process, figures = self._process, dict[str, float | None]()
        report = process.report()
        if report is not None:
            names = ("lag_messages", "lag_bytes", "lag_seconds", "messages")
            figures = {name: getattr(report, name) for name in names}
        served = process.served()
        if served is not None:
            figures["connections"] = served.connections
        return figures

    def _overview(self, _fields: Mapping[str, str]) -> _Page:
        """The first page: state of the process with cause and next step, charts, contents and cost of the archive,
        and findings."""
        process = self._process
        report, served = process.report(), process.served()
        (is_alive, health_text), (is_ready, why) = process.health(), process.readiness()
        # A readiness text reads "STATE, …" or "STATE: CAUSE. Next: STEP".
        state = report.state if report is not None else why.partition(",")[0].partition(":")[0]
        if not is_alive:
            state, why = "not working", health_text
        contents = self._archive.contents(SHORT_WAIT_S)
        cost = self._archive.cost(0.0 if contents.is_pending else SHORT_WAIT_S)
        findings = [] if report is None else of_report(report)
        if report is None and contents.value is not None:
            serving = process.serving()
            unreadable = () if serving is None else serving.fetcher.unreadable.ranges()
            findings = of_catalog(contents.value.state, wall_ms(), self._settings.settings.gc, unreadable)
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
        """Return the log histories that were replaced by another log of the broker, each with the time until which its
        messages are kept, or None: without end."""
        if contents.value is None or not contents.value.state.log_histories:
            return []
        grace_ms = self._settings.settings.gc.diverged_grace_ms
        return [
            ShownHistory(
                history,
                None if history.since_ms is None or history.is_kept else history.since_ms + grace_ms,
            )
            for history in self._archive.histories().value or ()
        ]

    def _topics(self, fields: Mapping[str, str]) -> _Page:
        """Return the page of topics: those that match a pattern, in a chosen order, with rule, oldest message, cost and
        lag of each. Until the catalog was read it says so instead."""
        choice, reading = parse_choice(fields), self._archive.contents()
        contents = reading.value
        if contents is None:
            return _Page("Topics", render("unread", found=reading))
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
        return _Page("Topics", render_topics(choice, shown, len(chosen), reading))

    def _queues(self, fields: Mapping[str, str]) -> _Page:
        """Return the page of one topic's queues with their offsets and lag; with code 404 if it has none. Until the
        catalog was read it says so instead."""
        topic, reading = fields.get("topic", ""), self._archive.contents()
        if reading.value is None:
            return _Page("Queues", render("unread", found=reading))
        lag = {queue.queue_id: queue.lag_messages for queue in self._lag() if queue.topic == topic}
        queues = self._archive.queues(topic)
        page = render_queues(topic, queues, lag, page_number(fields.get("page", "")), reading)
        return _Page(topic or "Queues", page, 200 if queues else 404)

    def _lag(self) -> Sequence[QueueReport]:
        report = self._process.report()
        return () if report is None else report.queues

    def _messages(self, fields: Mapping[str, str]) -> _Page:
        """Return the page with the search for messages and its results. Where clients need an account and no token
        protects the pages, it shows no messages, with code 403."""
        if self._token is None and self._process.has_accounts():
            return _Page("Messages", notice(_HIDDEN_MESSAGES, is_problem=False), 403)
        contents = self._archive.contents().value
        search, code, problem = Search(), 200, Markup()
        found: list[Message] = []
        try:
            search = parse_search(fields)
            if search.value:
                found = self._searched(lambda: find_messages(self._archive.access(), search))
        except TieredError as error:
            problem, code = failure(error), _code_of(error)
        topics = () if contents is None else contents.topics.names
        form = fields.get("form", "text")
        return _Page("Messages", render_messages(search, topics, found, problem, form), code)

    def _timers(self, fields: Mapping[str, str]) -> _Page:
        """Return the page of timers: how many are pending, and those with the unique key that was entered. Where
        clients need an account and no token protects the pages, it shows none, with code 403, as they are messages."""
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
        """Return what ``search`` finds, once fewer than SEARCHES_AT_ONCE others run. Raises UnavailableError after
        WAIT_S."""
        if not self._searching.acquire(timeout=WAIT_S):
            raise UnavailableError(
                f"{SEARCHES_AT_ONCE} other searches are running, and did not end in time",
                hint="try again later",
            )
        try:
            return search()
        finally:
            self._searching.release()

    def _clients(self, _fields: Mapping[str, str]) -> _Page:
        """Return the page of clients: consumer groups and what was relayed and served for them, and, once the archive
        is open, the figures of prefetching, caches and memory."""
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
