"""The command line before Spark starts: wrong usage as one line, and progress."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_tiered.cli.arguments import settings_of
from rocketmq_tiered.message_table.options.source_options import Mode, Source, SourceOptions
from rocketmq_tiered.process.logs import log_plain
from rocketmq_tiered.spark.cli import commands_reading
from rocketmq_tiered.spark.cli.arguments import source_of
from rocketmq_tiered.spark.cli.main import VERBS, main
from rocketmq_tiered.spark.jobs.search import fault_of_the_question

URL = "s3://bucket/archives"
SECRET = "c2VjcmV0LWtleQ"


@dataclass
class Tracker:
    """Spark's status tracker: each request finishes one more task of the only stage."""

    enough: threading.Event
    done: int = 0

    def getActiveStageIds(self) -> list[int]:  # noqa: N802 - Spark's name
        return [3]

    def getStageInfo(self, stage: int) -> Any:  # noqa: N802 - Spark's name
        self.done = min(self.done + 1, 4)
        if self.done == 4:
            self.enough.set()
        return SimpleNamespace(numCompletedTasks=self.done, numTasks=4)


def parsed(verb: str, *arguments: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    VERBS[verb].add_arguments(parser)
    return parser.parse_args(arguments)


def chosen(*arguments: str) -> SourceOptions:
    options = parsed("stats", URL, *arguments)
    return source_of(options, options.url, settings_of(options).settings.object_store)


def test_flags_become_options_of_the_data_source() -> None:
    found = chosen(
        "--endpoint-url",
        "http://127.0.0.1:9000",
        "--region",
        "eu-west-1",
        "--topic",
        "a,b*",
        "--permissive",
        "--generation",
        "all",
        "--option",
        "batchbytes=100000",
        "--option",
        "addressingStyle=path",
        "--at-version",
        "7",
        "--partition-bytes",
        "2000000",
    )
    assert found == SourceOptions(
        URL,
        Source.ARCHIVE,
        ("a", "b*"),
        all_generations=True,
        version=7,
        mode=Mode.PERMISSIVE,
        partition_bytes=2_000_000,
        batch_bytes=100_000,
        endpoint="http://127.0.0.1:9000",
        region="eu-west-1",
        addressing_style="path",
    )
    assert chosen() == SourceOptions(URL)
    assert chosen("--option", "version=7").version == 7
    assert chosen("--option", "mode=PERMISSIVE", "--partition-bytes", "1048576").mode is Mode.PERMISSIVE


def test_every_verb_accepts_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERED_CONFIG", raising=False)
    places = {"backfill": ["/store", URL], "export": [URL, URL], "diff": [URL, "/store"]}
    for verb in VERBS:
        options = parsed(
            verb, *places.get(verb, [URL]), "--endpoint-url", "http://minio:9000", "--region", "r"
        )
        store = settings_of(options).settings.object_store
        assert (store.endpoint_url, store.region) == ("http://minio:9000", "r"), verb
        assert options.json is False, verb


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--option", "nonsense=1"], "nonsense"),
        (["--option", "version"], "has no value"),
        (["--option", "topic=x"], "topic"),
        (["--option", "version=x"], "version is x"),
        (["--option", "partitionBytes=5"], "partitionBytes is 5"),
        (["--partition-bytes", "5"], "partitionBytes is 5"),
        (["--generation", "x"], "generation is x"),
        (["--since", "soon"], "since: soon is not a time"),
        (["--since", "2026-11-22", "--until", "2026-11-21"], "since is not before until"),
        (["--option", f"secretKey={SECRET}"], "AWS_PROFILE"),
        (["--option", f"ACCESSKEY={SECRET}"], "AWS_PROFILE"),
        (["--conf", "spark.x"], "has no value"),
        (["--set", "nonsense.key=1"], "nonsense"),
    ],
)
def test_wrong_usage_is_one_line_and_starts_no_spark(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rocketmq_tiered.spark.cli.arguments.session", lambda *_, **__: pytest.fail("Spark was started")
    )
    assert main(["stats", URL, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert word in said.err
    assert SECRET not in said.err


@pytest.mark.parametrize("verb", ["stats", "verify", "search"])
@pytest.mark.parametrize("url", ["s4://a[", "s3://a]/b"])
def test_an_impossible_address_is_wrong_usage(
    verb: str, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rocketmq_tiered.spark.cli.arguments.session", lambda *_, **__: pytest.fail("Spark was started")
    )
    assert main([verb, url, *(["--sql", "1 = 1"] if verb == "search" else [])]) == 2
    assert "URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats", "{}/nothing"],
        ["verify", "file://{}"],
        ["search", "{}/x", "--source", "store"],
        ["export", "{}", "file://{}/table"],
        ["diff", "{}", "{}"],
        ["compact-keys", "{}"],
        ["backfill", "{}/store", "file://{}/archive"],
    ],
)
def test_what_does_not_exist_starts_no_spark(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rocketmq_tiered.spark.cli.arguments.session", lambda *_, **__: pytest.fail("Spark was started")
    )
    given = [one.format(tmp_path) for one in arguments]
    given = [f"file://{one}" if arguments[0] == "compact-keys" and one[0] == "/" else one for one in given]
    assert main(given) == 3
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    "arguments",
    [["search", URL, "--limit", "-1"], ["diff", URL, "/store", "--limit", "x"], ["nonsense"], []],
)
def test_invalid_arguments_are_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "o1.getResult.\n: SparkException: x\n"
            "Caused by: [DIVIDE_BY_ZERO] Division by zero.\nUse y. SQLSTATE: 22012\n",
            "the query failed: [DIVIDE_BY_ZERO] Division by zero. Use y. SQLSTATE: 22012",
        ),
        (
            "Caused by: java.util.regex.PatternSyntaxException: Unclosed character class near index 0\n[\n^",
            "the query failed: Unclosed character class near index 0",
        ),
        ("[TASK_FAILED] lost. SQLSTATE: 58030", None),
    ],
)
def test_errors_of_query_values_are_usage_errors(text: str, said: str | None) -> None:
    found = fault_of_the_question(RuntimeError(text))
    assert (found and found.message) == said


def test_names_are_escaped_in_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", URL, "--option", "nonsense\x1b[2J\u202e=1"]) == 2
    with pytest.raises(SystemExit):
        main(["stats", URL, "--limit\x1b[2J"])
    assert not {"\x1b", "\u202e"} & set(capsys.readouterr().err)
    log_plain("info")
    logging.getLogger("test").warning("topic \x1b[2J skipped")
    assert capsys.readouterr().err.endswith("WARNING topic \\x1b[2J skipped\n")


@pytest.mark.parametrize("quiet", [False, True])
def test_tasks_are_counted_while_a_query_runs(
    quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_reading, "PROGRESS_S", 0.001)
    monkeypatch.setattr("rocketmq_tiered.process.progress.LINE_INTERVAL_S", 0.0)
    log_plain("info")
    tracker = Tracker(enough=threading.Event())
    spark: Any = SimpleNamespace(_jsc=1, sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    with commands_reading.stage_progress(spark, "stats", quiet=quiet):
        assert tracker.enough.wait(0.1 if quiet else 5) is not quiet
    said = capsys.readouterr().err
    assert ("stats 25% 1 of 4 tasks" in said) is not quiet
    assert said == "" if quiet else said.count("\n") >= 1


def test_names_are_escaped_in_lines_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    commands_reading._print_match({"topic": "t\x1b[2J\t\u202e", "tags": None, "queue": 3}, as_json=False)
    assert capsys.readouterr().out == "t\\x1b[2J\\t\\u202e\t\t3\n"
