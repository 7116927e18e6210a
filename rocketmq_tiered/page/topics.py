"""Renders the table of topics and the queues of one topic, page by page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

from fetcher.queries.queue_listing import QueueListing
from rocketmq_tiered.maintenance.cost import TopicCost
from rocketmq_tiered.page.archive_view import ORDERS, TopicRow
from rocketmq_tiered.page.html import (
    UNKNOWN,
    Child,
    Html,
    bytes_text,
    count_text,
    date_text,
    section,
    table,
    tag,
)
from rocketmq_tiered.page.overview import queues_path, topic_link
from rocketmq_tiered.process.report import QueueReport
from tiered.console import counted
from tiered.settings.topic_rules import POLICY_KEY, TTL_KEY, TopicRule

TOPICS_A_PAGE, QUEUES_A_PAGE = 50, 100
GAPS_SHOWN = 50


@dataclass(frozen=True)
class TopicChoice:
    """Which topics are shown: those whose names contain ``pattern``, in ``order``, from page 0."""

    pattern: str = ""
    order: str = "topic"
    page: int = 0

    @property
    def path(self) -> str:
        """The path of this choice."""
        fields = {"filter": self.pattern, "order": self.order, "page": self.page}
        return f"/topics?{urlencode({name: value for name, value in fields.items() if value})}"


@dataclass(frozen=True)
class ShownTopic:
    """One row of the table. ``oldest_ms`` and ``cost`` None: not known yet, or there is none."""

    row: TopicRow
    rule: TopicRule
    oldest_ms: int | None
    cost: TopicCost | None
    lag_messages: int


def parse_choice(query: Mapping[str, str]) -> TopicChoice:
    """The choice in a query; unknown values are the default."""
    order, page = query.get("order", ""), query.get("page", "")
    return TopicChoice(query.get("filter", ""), order if order in ORDERS else "topic", page_number(page))


def page_number(text: str) -> int:
    """The page number in a query; 0 for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0


def render_topics(choice: TopicChoice, topics: Sequence[ShownTopic], total: int, problem: Child) -> Html:
    """The page: a form, and the topics of ``choice`` out of ``total`` that match."""
    options = [tag("option", f"by {order}", value=order, selected=order == choice.order) for order in ORDERS]
    form = tag(
        "form",
        tag(
            "label",
            "Filter",
            tag(
                "input",
                type="search",
                name="filter",
                value=choice.pattern,
                placeholder="part of a name",
                autocomplete="off",
                spellcheck="false",
            ),
        ),
        tag("label", "Order", tag("select", options, name="order")),
        tag("button", "Show"),
        method="get",
        action="/topics",
        role="search",
        class_="bar",
    )
    rows = [_topic_row(topic) for topic in topics]
    header = [
        "Topic",
        "Queues",
        "Messages",
        "Bytes",
        "Stored",
        "Oldest",
        "Newest",
        "TTL",
        "Read policy",
        "Gaps",
        "Lag",
    ]
    shown = table("Topics", header, rows, (1, 2, 3, 4, 9, 10)) if rows else tag("p", "No topic matches.")
    pages = _pages(total, TOPICS_A_PAGE, choice.page, lambda page: replace(choice, page=page).path)
    found = section("topics", "Topics", problem, shown, pages, note=f"{total:,} found")
    return tag("div", form, found, class_="grid")


def _topic_row(topic: ShownTopic) -> list[Child]:
    row, rule = topic.row, topic.rule
    return [
        topic_link(row.topic),
        count_text(row.queues),
        count_text(row.messages),
        bytes_text(row.bytes),
        UNKNOWN if topic.cost is None else bytes_text(topic.cost.stored_bytes),
        date_text(topic.oldest_ms),
        date_text(row.newest_ms),
        _with_source(rule.ttl, rule.ttl_from, TTL_KEY),
        _with_source(rule.read_policy, rule.read_policy_from, POLICY_KEY),
        tag("span", count_text(row.gaps), class_="bad") if row.gaps else "0",
        count_text(topic.lag_messages),
    ]


def _with_source(value: str, source: str, default: str) -> Child:
    return value if source == default else [value, tag("small", source)]


def render_queues(
    topic: str, queues: Sequence[QueueListing], lag: Mapping[int, QueueReport], page: int, problem: Child
) -> Html:
    """The page of one topic."""
    first = page * QUEUES_A_PAGE
    rows = [_queue_row(queue, lag.get(queue.queue_id)) for queue in queues[first : first + QUEUES_A_PAGE]]
    header = ["Queue", "Generation", "Kind", "Minimum", "Maximum", "Messages", "Bytes", "Newest", "Lag", ""]
    shown = table(f"Queues of {topic}", header, rows, (1, 3, 4, 5, 6, 8)) if rows else tag("p", "No queue.")
    path = queues_path(topic)
    pages = _pages(len(queues), QUEUES_A_PAGE, page, lambda number: f"{path}&page={number}")
    gaps = [(queue, gap) for queue in queues for gap in queue.gaps]
    parts = [section("queues", topic, problem, shown, pages, note=counted(len(queues), "queue"))]
    if gaps:
        listed = [
            (
                queue.queue_id,
                queue.generation,
                count_text(gap.begin_offset),
                count_text(gap.end_offset - 1),
                gap.reason,
            )
            for queue, gap in gaps[:GAPS_SHOWN]
        ]
        header = ["Queue", "Generation", "First missing", "Last missing", "Reason"]
        parts.append(section("gaps", "Gaps", table("Gaps", header, listed, (1, 2, 3)), note=f"{len(gaps):,}"))
    back = tag("p", tag("a", "← All topics", href="/topics"))
    return tag("div", back, parts, class_="grid")


def _queue_row(queue: QueueListing, lag: QueueReport | None) -> list[Child]:
    newest = {
        "by": "offset",
        "topic": queue.topic,
        "queue": queue.queue_id,
        "generation": queue.generation,
        "value": queue.max_offset - 1,
    }
    link = tag("a", "newest message", href=f"/messages?{urlencode(newest)}") if queue.messages else ""
    return [
        queue.queue_id,
        queue.generation,
        queue.kind,
        count_text(queue.min_offset),
        count_text(queue.max_offset),
        count_text(queue.messages),
        bytes_text(queue.bytes),
        date_text(queue.newest_ms),
        count_text(lag.lag_messages if lag is not None else 0),
        link,
    ]


def _pages(total: int, size: int, page: int, path_of: Callable[[int], str]) -> Html | None:
    last = max(0, (total - 1) // size)
    if last == 0 and page == 0:
        return None
    words: list[Child] = [f"Page {page + 1:,} of {last + 1:,}"]
    if page > 0:
        words.insert(0, tag("a", "← Previous", href=path_of(min(page - 1, last)), rel="prev"))
    if page < last:
        words.append(tag("a", "Next →", href=path_of(page + 1), rel="next"))
    return tag("nav", words, class_="pages", aria_label="More rows")
