"""Rendering of the admin page from values: escaping, figures, pictures, findings, paging.

Messages as lines, with bodies in the requested form.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rocketmq_tiered.cli.rendering import BodyForm, is_charset, jsonl_line
from rocketmq_tiered.page.archive_view import summarize
from rocketmq_tiered.page.kept_values import History
from rocketmq_tiered.page.messages import body_text_of, hex_dump
from rocketmq_tiered.page.overview import _upkeep, severity_of
from rocketmq_tiered.process.findings import Finding, of_catalog, of_relay, of_report
from rocketmq_tiered.process.metrics import status_families
from rocketmq_tiered.process.report import decode_report
from rocketmq_tiered.sending.timer_status import TimerStatus
from rocketmq_tiered.server.proxy.relay_status import ProxyStatus, SlaveStatus
from tests.kernels.record_builder import Message, encode, properties
from tests.process.status_report import REPORT
from tiered.archive.task import TaskStatus
from tiered.archive.unreadable import UnreadableRange
from tiered.catalog.deletions import DeletionList, PendingDeletion, Reason
from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, QUEUE_BATCH, QUEUE_HIDDEN, QUEUE_STATE_DTYPE
from tiered.settings.sections import GcSettings


def test_bodies_are_text_or_hex() -> None:
    assert body_text_of("grün\n{}".encode(), 100) == "grün\n{}"
    assert body_text_of("üü".encode(), 3) == "ü", "cut inside a character"
    assert body_text_of(b"\xff\xfe", 100) is None and body_text_of(bytes(20), 100) is None
    assert hex_dump(b"ab<\x00" + bytes(16)).splitlines()[0].endswith("ab<.............")
    assert hex_dump(bytes(17)).splitlines()[1].startswith("00000010  00 ")


def test_history_keeps_an_hour_and_goes_over_failures() -> None:
    now_s = 0.0

    def measure() -> dict[str, float | None]:
        if now_s == 3701.0:
            raise UnavailableError("stopping")
        return {"lag": now_s, "other": None}

    history = History(measure, Clock(monotonic_s=lambda: now_s))
    for at_s in (0.0, 3000.0, 3700.0, 3701.0):
        now_s = at_s
        history.sample()
    assert history.points("lag") == [(701.0, 3000.0), (1.0, 3700.0)] and not history.points("other")


def test_a_state_with_findings_is_not_green() -> None:
    finding = Finding("gaps", "4 gaps", "tiered ls")
    assert severity_of("following", is_ready=True, findings=[finding]) == "warn"
    assert severity_of("following", is_ready=True, findings=[replace(finding, is_bad=True)]) == "bad"
    assert severity_of("blocked: archive", is_ready=False, findings=[finding]) == "bad"


def test_findings_name_the_next_step() -> None:
    report = replace(REPORT, retention_margin_seconds=120.0, pin_note="no room", unindexed_objects=2)
    found = of_report(report)
    assert [finding.is_bad for finding in found] == [True, False, False]
    assert "2m 00s" in found[0].what and all(finding.step for finding in found)
    assert of_report(replace(REPORT, retention_margin_seconds=None)) == []
    assert "3 gaps" in of_catalog(CatalogState(gaps=np.zeros(3, GAP_DTYPE)), 0, GcSettings())[0].what
    proxy = ProxyStatus("h:1", 1, True, (), 1, has_plain_accounts=True)
    slave = SlaveStatus("h:1", 1, True, (), 7, False, None, (), "refused")
    assert "TLS" in of_relay(proxy)[0].what and "refused" in of_relay(slave)[0].what


def test_findings_of_timers_say_what_is_true() -> None:
    """One that the broker refuses does not mean that none is delivered."""

    def found(**figures: float) -> list[str]:
        timers = TimerStatus(
            pending=3, delivered=3006, problem="TIERED_TIMERS queue 0 offset 1: no topic", **figures
        )  # type: ignore[arg-type]
        report = replace(REPORT, retention_margin_seconds=None, timers=timers)
        return [finding.what.partition(":")[0] for finding in of_report(report)]

    assert found() == []
    assert found(postponed=1) == ["the broker refuses 1 timer, sent again every ten minutes"]
    assert found(refused=2) == ["2 messages to the gateway topic will not be delivered"]
    assert found(overdue_seconds=90.0) == ["timers are not delivered"]


def test_unreadable_messages_are_a_critical_finding() -> None:
    ranges = tuple(
        UnreadableRange("orders", 0, 0, begin, begin + 20, "sets/1.sso", "damaged", phys)
        for begin, phys in ((0, 1000), (20, 5000))
    )
    report = replace(REPORT, retention_margin_seconds=None, unreadable=ranges, broker_min_phys=900)
    assert decode_report(report.to_json()) == report
    (finding,) = of_report(report)
    assert finding.is_bad and finding.step
    assert finding.what == (
        "40 archived messages cannot be read: orders queue 0: offsets 0 to 19 and 1 more range, because sets/1.sso is "
        "missing or damaged; the broker still has them"
    )
    (finding,) = of_report(replace(report, broker_min_phys=2000))
    assert "the broker still has those of 1 of 2 ranges" in finding.what
    (finding,) = of_report(replace(report, broker_min_phys=6000))
    assert "the broker no longer has them" in finding.what
    families = {family.name: family for family in status_families(report)}
    assert families["rocketmq_tiered_store_unreadable_messages"].samples[0].value == 40
    attention = families["rocketmq_tiered_store_attention"].samples
    assert [one.labels["about"] for one in attention if one.value] == ["unreadable"]


def test_the_archive_names_the_last_passes_and_what_is_to_be_deleted() -> None:
    pending = {"a": PendingDeletion(1, 5, Reason.EXPIRED), "b": PendingDeletion(1, 5, Reason.EXPIRED)}
    pending |= {name: PendingDeletion(1, 5, Reason.INTENT) for name in "cde"}
    listed = DeletionList("k", Reason.COMPACTED, 1500, 1, 5, 5, 9)
    state = CatalogState(pending_deletions=pending, deletion_lists=(listed,))
    report = replace(
        REPORT,
        tasks=(
            TaskStatus("expiry", last_ms=60_000),
            TaskStatus("garbage collection", last_ms=120_000, problem="denied"),
        ),
    )
    assert dict(_upkeep(state, report)) == {
        "Last expiry": "1970-01-01 00:01:00, done",
        "Last garbage collection": "1970-01-01 00:02:00, denied",
        "To be deleted": "1,500 joined to larger ones, 2 expired, 3 of a compaction that is not finished",
    }
    assert _upkeep(CatalogState(), None) == []


def made_state(topics: int, queues: int) -> CatalogState:
    """A catalog with topics "t0"…, each with so many queues of 10 messages and 1,000 bytes."""
    keys = [QueueKey(f"t{topic}", queue, 0) for topic in range(topics) for queue in range(queues)]
    table = np.zeros(len(keys), QUEUE_STATE_DTYPE)
    table["row_count"], table["end_queue_offset"], table["end_byte"] = 10, 10, 1000
    table["max_store_timestamp"] = np.arange(len(keys))
    return CatalogState(directory=QueueDirectory(keys), table=table)


def test_queues_are_summed_up_by_topic() -> None:
    state = made_state(3, 4)
    state.table["flags"][:4] = QUEUE_HIDDEN
    state.table["flags"][4] = QUEUE_BATCH
    state.table["end_queue_offset"][4] = 110
    gaps = np.zeros(2, GAP_DTYPE)
    gaps["queue"] = 5, 0
    found = summarize(replace(state, gaps=gaps))
    assert found.names == ("t1", "t2") and found.row(0).messages == 140 and found.row(1).messages == 40
    assert found.row(0).gaps == 1 and found.row(0).bytes == 4000 and found.row(1).newest_ms == 11
    assert found.chosen("T", "messages") == [0, 1] and found.chosen("2", "topic") == [1]
    assert found.chosen("", "newest") == [1, 0]
    more = replace(
        state,
        directory=state.directory.extended(12, [QueueKey("t0", 9, 0)]),
        table=np.append(state.table, state.table[-1:]),
    )
    assert summarize(more).names == ("t0", "t1", "t2"), "the same directory, extended"


QUEUE = QueueKey("t", 3, 0)


def shown(body: bytes, form: str | None) -> dict[str, Any]:
    """A message with ``body``, as printed and parsed again."""
    line = jsonl_line(encode(_message(body), 4096), QUEUE, 7, body_form=BodyForm(form))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    document: dict[str, Any] = json.loads(line)
    return document


def _message(body: bytes) -> Message:
    return Message(topic=b"t", queue_id=3, queue_offset=7, body=body, properties=properties((b"TAGS", b"a")))


@pytest.mark.parametrize("form", [None, "text", "hex", "json"])
def test_a_body_that_its_producer_did_not_compress_as_it_says_is_null(
    form: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    record = encode(Message(topic=b"t", queue_id=3, queue_offset=7, body=b"plain", sys_flag=0x1), 4096)
    document = json.loads(jsonl_line(record, QUEUE, 7, body_form=BodyForm(form) if form else None))
    assert (document["bodyLen"], document["bodySha256"], document["wireBodyLen"]) == (None, None, 5)
    assert document.get("body") is None and ("body" in document) is (form is not None)
    assert "t queue 3 offset 7: the body cannot be decompressed" in caplog.text


def test_an_inner_batch_that_does_not_decode_is_null(caplog: pytest.LogCaptureFixture) -> None:
    record = encode(Message(topic=b"t", queue_id=3, queue_offset=7, body=b"no batch", sys_flag=0x80), 4096)
    document = json.loads(jsonl_line(record, QUEUE, 7, body_form=BodyForm("text")))
    assert (document["inner"], document["bodyLen"], document["body"]) == (None, 8, "no batch")
    assert "offset 7: the body cannot be decompressed" in caplog.text


@pytest.mark.parametrize(
    ("body", "form", "expected"),
    [
        ("größer\n".encode(), "text", "größer\n"),
        (b"a\xffb", "text", "a\ufffdb"),
        (b"\x00\xff", "hex", "00ff"),
        (b"", "hex", ""),
        (b'{"a":\r\n [1, 2.5, null]}\n', "json", {"a": [1, 2.5, None]}),
        (b"not JSON", "json", None),
        (b"\xff", "json", None),
        (b"", "json", None),
    ],
)
def test_bodies(body: bytes, form: str, expected: object) -> None:
    assert shown(body, form)["body"] == expected


@pytest.mark.parametrize(
    "body",
    [b"123456789012345678901234567890", b'{"price": 0.12345678901234567890123, "id": 18446744073709551616}'],
)
def test_numbers_of_a_json_body_keep_all_their_digits(body: bytes) -> None:
    assert body in jsonl_line(encode(_message(body), 4096), QUEUE, 7, body_form=BodyForm("json"))


def test_bodies_that_are_not_of_the_charset_are_counted() -> None:
    chinese = "订单".encode("gbk")
    form, gbk = BodyForm("text"), BodyForm("text", "GBK")
    assert (form(b"abc"), form(chinese), form(chinese)) == (
        "abc",
        "\ufffd\ufffd\ufffd\ufffd",
        "\ufffd\ufffd\ufffd\ufffd",
    )
    assert form.replaced == 2
    assert gbk(chinese) == "订单" and gbk.replaced == 0
    assert BodyForm("hex")(chinese) == chinese.hex()


@pytest.mark.parametrize(
    ("name", "is_one"), [("UTF-8", True), ("gbk", True), ("rot13", False), ("hex", False), ("x", False)]
)
def test_only_charsets_decode_text(name: str, is_one: bool) -> None:
    assert is_charset(name) is is_one
