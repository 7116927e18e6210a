"""The page of ``tiered-spark stats``: one self-contained HTML file. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from rocketmq_tiered.spark.jobs.charts import (
    SERIES_MAX,
    Series,
    bars,
    histogram,
    legend,
    short,
    stacked_columns,
)
from rocketmq_tiered.spark.jobs.stats import NamedCount, Stats, TopicStats
from tiered.console import duration_text, size_text, time_text

TOPICS_CHARTED = 20
TOPICS_LISTED = 500
QUEUE_BARS_MAX = 64
STRIP_PX = 140
"""Maximum width of all bars of a topic's queues."""

_STYLE = """
:root{--bg:#fafafa;--card:#fff;--ink:#1b1f24;--dim:#5c6670;--line:#e3e6ea;
--c0:#2f6fde;--c1:#1f9d8a;--c2:#e08a1e;--c3:#9557c8;--c4:#d1495b;--c5:#6b8e23;--c6:#9aa4af}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1d2126;--ink:#e6e9ec;--dim:#98a2ac;--line:#31373e;
--c0:#6ea0ff;--c1:#43c7b2;--c2:#f2ad4e;--c3:#bd8cf0;--c4:#ef7685;--c5:#a3c659;--c6:#6f7a85}}
body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere}h2{font-size:16px;margin:0 0 10px}
.dim{color:var(--dim)}section{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:16px 18px;margin-top:18px;overflow-x:auto}section>svg{min-width:680px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:18px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.tile b{display:block;font-size:20px;font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:right;color:var(--dim);font-weight:500;white-space:nowrap}
td{text-align:right;white-space:nowrap}th,td{padding:4px 8px;border-bottom:1px solid var(--line)}
th.l,td.l{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:200px;max-width:420px}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}svg .t{fill:var(--dim)}svg .g{stroke:var(--line)}
.key{display:inline-flex;align-items:center;gap:6px;margin:0 16px 8px 0;color:var(--dim)}
.s0{fill:var(--c0)}.s1{fill:var(--c1)}.s2{fill:var(--c2)}.s3{fill:var(--c3)}.s4{fill:var(--c4)}
.s5{fill:var(--c5)}.s6{fill:var(--c6)}
.strip{display:inline-flex;align-items:flex-end;gap:1px;height:22px;vertical-align:bottom}
.strip i{display:block;background:var(--c0)}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:18px}
.two section{margin-top:0;min-width:0}
.two th.l,.two td.l{min-width:80px}
"""


def page(stats: Stats, made_ms: int) -> str:
    """The whole document."""
    sections = [
        _tiles(stats),
        _section("Messages over time", _rates(stats)),
        _section("Bytes by topic", _bytes_by_topic(stats.topics)),
        _section("Topics", _topics(stats)),
        _section("Record sizes", _sizes(stats)),
    ]
    if stats.has_records:
        tags = _names("Tags", "tag", [_shown(one) for one in stats.tags])
        keys = _names("Frequent keys", "key", stats.keys)
        sections.append(f'<div class="two" style="margin-top:18px">{tags}{keys}</div>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(stats.title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{escape(stats.title)}</h1>"
        f'<div class="dim">as of {time_text(made_ms)}; times are UTC</div>{"".join(sections)}</main></body></html>\n'
    )


def _tiles(stats: Stats) -> str:
    topics = stats.topics
    messages = sum(one.messages for one in topics)
    message_bytes = sum(one.message_bytes for one in topics)
    stored = sum(one.stored_bytes for one in topics)
    packed = sum(one.message_bytes for one in topics if one.stored_bytes)
    span_ms = max((one.last_ms for one in topics), default=0) - min(
        (one.first_ms for one in topics), default=0
    )
    tiles = [
        (f"{messages:,}", "messages"),
        (size_text(message_bytes), "records"),
        (size_text(stored) if stored else "–", "in objects"),
        (f"{packed / stored:.1f} : 1" if stored else "–", "compression"),
        (f"{len(topics):,}", "topics"),
        (f"{len(stats.queues):,}", "queues"),
        (duration_text(span_ms / 1000), "from first to last"),
    ]
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="dim">{name}</span></div>'
        for value, name in tiles
    )
    return f'<div class="tiles">{boxes}</div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body or NOTHING}</section>"


NOTHING = '<span class="dim">nothing</span>'


def _rates(stats: Stats) -> str:
    by_messages = sorted(stats.topics, key=lambda one: (-one.messages, one.topic))
    named = [one.topic for one in by_messages[: SERIES_MAX - 1]]
    rest = len(by_messages) - len(named)
    times = _times(stats)
    position = {begin: i for i, begin in enumerate(times)}
    values: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(times))
    per_s = 1000 / stats.bucket_ms if stats.bucket_ms else 1.0
    for bucket in stats.buckets:
        name = bucket.topic if bucket.topic in named else ""
        values[name][position[bucket.begin_ms]] += bucket.messages * per_s
    series = [Series(name, values[name]) for name in named]
    if rest:
        series.append(Series(f"{rest} other topics", values[""]))
    steps = f"messages per second, in steps of {duration_text(stats.bucket_ms / 1000)}"
    note = f'<div class="dim">{steps}, from {time_text(times[0])} on</div>' if times else ""
    chart = stacked_columns(times, stats.bucket_ms, series, "messages/s")
    return legend([one.name for one in series]) + note + chart if times else ""


def _times(stats: Stats) -> list[int]:
    begins = [bucket.begin_ms for bucket in stats.buckets]
    return list(range(min(begins), max(begins) + 1, stats.bucket_ms)) if begins else []


def _bytes_by_topic(topics: Sequence[TopicStats]) -> str:
    shown = topics[:TOPICS_CHARTED]
    chart = bars([(one.topic, one.message_bytes, _bytes_text(one)) for one in shown])
    left = len(topics) - len(shown)
    return chart + (f'<div class="dim">and {left:,} smaller topics, listed below</div>' if left else "")


def _bytes_text(one: TopicStats) -> str:
    return size_text(one.message_bytes) + (
        f", stored {size_text(one.stored_bytes)}" if one.stored_bytes else ""
    )


def _topics(stats: Stats) -> str:
    queues: dict[str, list[int]] = defaultdict(list)
    for queue in stats.queues:
        queues[queue.topic].append(queue.messages)
    head = ("queues", "balance", "messages", "records", "stored", "ratio", "p50", "p90", "p99", "largest",
            "first and last")  # fmt: skip
    rows = []
    for one in stats.topics[:TOPICS_LISTED]:
        cells = [
            str(one.queues), _strip(queues[one.topic]), f"{one.messages:,}", size_text(one.message_bytes),
            size_text(one.stored_bytes) if one.stored_bytes else "–", f"{one.ratio:.1f}" if one.ratio else "–",
            *(size_text(size) for size in (one.p50_bytes, one.p90_bytes, one.p99_bytes, one.max_bytes)),
            f"{time_text(one.first_ms)}<br>{time_text(one.last_ms)}",
        ]  # fmt: skip
        rows.append(
            f'<tr><td class="l">{escape(one.topic)}</td>' + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
        )
    left = len(stats.topics) - len(rows)
    note = f'<div class="dim">and {left:,} smaller topics</div>' if left else ""
    heads = "".join(f"<th>{name}</th>" for name in head)
    table = f'<table><tr><th class="l">topic</th>{heads}</tr>{"".join(rows)}</table>'
    return f'<div class="wide">{table}</div>{note}<div class="dim">{_FOOTNOTE}</div>'


_FOOTNOTE = (
    "balance: messages of each queue; p50, p90, p99: approximate percentiles of the record size; "
    "stored: the topic's share of its objects; LMQs show the messages of their parent queues and take no space"
)


def _strip(messages: Sequence[int]) -> str:
    if len(messages) > QUEUE_BARS_MAX:
        return f"{short(min(messages))} … {short(max(messages))}"
    most = max(messages, default=0) or 1
    heights = (max(2, round(22 * count / most)) for count in messages)
    width = min(6, STRIP_PX // max(len(messages), 1) - 1)
    return (
        '<span class="strip">'
        + "".join(f'<i style="width:{width}px;height:{height}px"></i>' for height in heights)
        + "</span>"
    )


def _sizes(stats: Stats) -> str:
    counts = dict(stats.sizes)
    if not counts:
        return ""
    powers = range(min(counts).bit_length() - 1, max(counts).bit_length())
    rows = [(size_text(1 << power), float(counts.get(1 << power, 0))) for power in powers]
    return (
        '<div class="dim">messages whose record has at least so many bytes, and less than twice</div>'
        + histogram(rows, "messages")
    )


def _shown(one: NamedCount) -> NamedCount:
    return one if one.name else NamedCount(one.topic, "(none)", one.messages, one.message_bytes)


def _names(title: str, what: str, found: Sequence[NamedCount]) -> str:
    rows = "".join(
        f'<tr><td class="l">{escape(one.name)}</td><td class="l">{escape(one.topic)}</td>'
        f"<td>{one.messages:,}</td><td>{size_text(one.message_bytes)}</td></tr>"
        for one in found
    )
    head = f'<tr><th class="l">{what}</th><th class="l">topic</th><th>messages</th><th>records</th></tr>'
    return _section(title, f'<div class="wide"><table>{head}{rows}</table></div>' if found else "")
