"""Renders the table of topics and the queues of one topic, page by page. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from markupsafe import Markup

from fetcher.queries.queue_listing import QueueListing
from rocketmq_tiered.maintenance.cost import TopicCost
from rocketmq_tiered.page.archive_view import ORDERS, Contents, TopicRow
from rocketmq_tiered.page.html import render
from rocketmq_tiered.page.kept_values import Reading
from tiered.settings.topic_rules import POLICY_KEY, TTL_KEY, TopicRule

TOPICS_A_PAGE, QUEUES_A_PAGE = 50, 100


@dataclass(frozen=True)
class TopicChoice:
    """Which topics are shown: those whose names contain ``pattern``, in ``order``, from page 0."""

    pattern: str = ""
    order: str = "topic"
    page: int = 0

    @property
    def path(self) -> str:
        """The path of this choice, but for the page."""
        fields = {"filter": self.pattern, "order": self.order}
        return f"/topics?{urlencode({name: value for name, value in fields.items() if value})}&"


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


def render_topics(
    choice: TopicChoice, topics: Sequence[ShownTopic], total: int, found: Reading[Contents]
) -> Markup:
    """Return the page of topics: a form, and the ``topics`` on the page that ``choice`` names, of ``total`` that match.
    ``found``: the catalog that they were read from."""
    return render(
        "topics",
        choice=choice,
        topics=topics,
        total=total,
        found=found,
        orders=ORDERS,
        page_size=TOPICS_A_PAGE,
        ttl_key=TTL_KEY,
        policy_key=POLICY_KEY,
    )


def render_queues(
    topic: str, queues: Sequence[QueueListing], lag: Mapping[int, int], page: int, found: Reading[Contents]
) -> Markup:
    """Return the page of one topic: its queues, a page of them at a time, and all its gaps. ``lag``: queue id to
    messages that are not archived yet; ``found``: the catalog that the queues were read from."""
    gaps = [
        (queue.queue_id, queue.generation, f"{gap.begin_offset:,}", f"{gap.end_offset - 1:,}", gap.reason)
        for queue in queues
        for gap in queue.gaps
    ]
    shown = queues[page * QUEUES_A_PAGE : (page + 1) * QUEUES_A_PAGE]
    return render(
        "queues",
        topic=topic,
        queues=queues,
        shown=shown,
        lag=lag,
        gaps=gaps,
        page=page,
        found=found,
        page_size=QUEUES_A_PAGE,
    )
