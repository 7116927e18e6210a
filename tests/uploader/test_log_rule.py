"""Which logs continue an archive: the table of decisions, and what shows it where no bytes are left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from uploader.log_rule import (
    ArchivedEnd,
    LogDecision,
    LogFacts,
    LogHead,
    LogLimits,
    Shared,
    Step,
    decide_log,
    misfit,
)

RUN, BACKFILL = LogLimits(truncate_max_bytes=100), LogLimits()
END = ArchivedEnd({("a", 0): 50, ("b", 1): 7}, 1_000, frozenset({"10.0.0.1:10911"}))
HEAD = LogHead({("a", 0): 60, ("b", 1): 7}, 1_000, "10.0.0.1:10911")

TABLE = [
    (LogFacts(Shared.END), RUN, Step.CONTINUE, ""),
    (LogFacts(Shared.END_DELETED), RUN, Step.CONTINUE, ""),
    (
        LogFacts(Shared.END_DELETED, misfit="it is older"),
        RUN,
        Step.STOP,
        "no bytes in common with the archive, and",
    ),
    (LogFacts(Shared.END_DELETED, misfit="it is older"), BACKFILL, Step.STOP, "it is older"),
    (LogFacts(Shared.EARLIER, lost_bytes=100), RUN, Step.NEW_HISTORY, ""),
    (
        LogFacts(Shared.EARLIER, lost_bytes=101),
        RUN,
        Step.STOP,
        r"101 bytes, more than 100 bytes",
    ),
    (LogFacts(Shared.EARLIER, lost_bytes=101), BACKFILL, Step.NEW_HISTORY, ""),
    (LogFacts(Shared.EARLIER, is_older_copy=True), BACKFILL, Step.STOP, "an older copy"),
    (LogFacts(Shared.EARLIER_DELETED, lost_bytes=1), RUN, Step.NEW_HISTORY, ""),
    (LogFacts(Shared.EARLIER_DELETED, lost_bytes=101), RUN, Step.STOP, "more than 100 bytes"),
    (LogFacts(Shared.EARLIER_DELETED, misfit="it is older"), RUN, Step.STOP, "it is older"),
    (LogFacts(Shared.NOTHING), RUN, Step.STOP, "shares nothing"),
    (LogFacts(Shared.NOTHING), BACKFILL, Step.STOP, "shares nothing"),
]


@pytest.mark.parametrize(("facts", "limits", "step", "why"), TABLE)
def test_bytes_that_cannot_be_compared_prove_nothing(
    facts: LogFacts, limits: LogLimits, step: Step, why: str
) -> None:
    found = decide_log(facts, limits)
    assert found.step is step and why in found.why and bool(found.why) == (step is Step.STOP)
    same = decide_log(facts, LogLimits(False, limits.truncate_max_bytes, same_broker=True))
    assert same == decide_log(replace(facts, misfit=""), limits)
    allowed = decide_log(facts, LogLimits(True, limits.truncate_max_bytes))
    assert allowed.step is (Step.CONTINUE if step is Step.CONTINUE else Step.NEW_HISTORY)
    assert allowed.is_foreign == found.is_foreign


def test_a_log_is_foreign_if_nothing_shows_that_it_is_this_brokers() -> None:
    foreign = [facts for facts, limits, *_ in TABLE if decide_log(facts, limits).is_foreign]
    assert {facts.shared for facts in foreign} == {Shared.NOTHING, Shared.END_DELETED, Shared.EARLIER_DELETED}
    assert all(facts.misfit or facts.shared is Shared.NOTHING for facts in foreign)
    assert decide_log(LogFacts(Shared.END), RUN) == LogDecision(Step.CONTINUE)


MISFITS = [
    (HEAD, ""),
    (LogHead({("a", 0): 50, ("new", 0): 0}, 1_000, "10.0.0.1:10911"), ""),
    (LogHead(), "no record"),
    (LogHead(HEAD.begins, 999, HEAD.host), "older than the archive's newest"),
    (
        LogHead(HEAD.begins, 1_000, "10.0.0.2:10911"),
        "are of 10.0.0.2:10911, but those of the archive of 10.0.0.1",
    ),
    (LogHead({("c", 0): 0}, 1_000, HEAD.host), "none of the archive's queues"),
    (LogHead({("a", 0): 49, ("b", 1): 7}, 1_000, HEAD.host), "a queue 0 begins at 49 there, and ends at 50"),
]


@pytest.mark.parametrize(("head", "why"), MISFITS)
def test_the_rest_fits_if_offsets_times_and_the_host_do(head: LogHead, why: str) -> None:
    found = misfit(END, head)
    assert why in found and bool(found) == bool(why)


def test_an_archive_without_queues_says_nothing_about_them() -> None:
    assert misfit(ArchivedEnd({}, 0, END.hosts), HEAD) == ""
    assert "of none" in misfit(ArchivedEnd({}, 0, frozenset()), HEAD)
