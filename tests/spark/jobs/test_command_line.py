"""The command line before Spark starts: wrong usage as one line."""

import logging
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.cli.arguments import settings_of
from rocketmq_tiered.message_table.options.source_options import Mode, Source, SourceOptions
from rocketmq_tiered.process.logs import log_plain
from rocketmq_tiered.spark.cli.arguments import source_of
from rocketmq_tiered.spark.cli.main import VERBS, main
from tiered.object_store.interface import StoreOptions
from tiered.settings.sections import ObjectStoreSettings

URL = "s3://bucket/archives"
SECRET = "c2VjcmV0LWtleQ"


def parsed(verb: str, *arguments: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    VERBS[verb][0].add_arguments(parser)
    return parser.parse_args(arguments)


def chosen(*arguments: str) -> SourceOptions:
    options = parsed("export", URL, "file:///table", *arguments)
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
        store=StoreOptions(
            ObjectStoreSettings(
                endpoint_url="http://127.0.0.1:9000", region="eu-west-1", addressing_style="path"
            )
        ),
    )
    assert chosen() == SourceOptions(URL)
    assert chosen("--option", "version=7").version == 7
    assert chosen("--option", "mode=PERMISSIVE", "--partition-bytes", "1048576").mode is Mode.PERMISSIVE


def test_every_verb_accepts_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERED_CONFIG", raising=False)
    places = {"backfill": ["/store", URL], "export": [URL, URL]}
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
    assert main(["export", URL, "file:///table", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert word in said.err
    assert SECRET not in said.err


@pytest.mark.parametrize("url", ["s4://a[", "s3://a]/b"])
def test_an_impossible_address_is_wrong_usage(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rocketmq_tiered.spark.cli.arguments.session", lambda *_, **__: pytest.fail("Spark was started")
    )
    assert main(["verify", url]) == 2
    assert "URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "file://{}"],
        ["export", "{}", "file://{}/table"],
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
    [["verify", URL, "--limit", "1"], ["search", URL], ["nonsense"], []],
)
def test_invalid_arguments_are_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_names_are_escaped_in_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", URL, URL, "--option", "nonsense\x1b[2J\u202e=1"]) == 2
    with pytest.raises(SystemExit):
        main(["verify", URL, "--limit\x1b[2J"])
    assert not {"\x1b", "\u202e"} & set(capsys.readouterr().err)
    log_plain("info")
    logging.getLogger("test").warning("topic \x1b[2J skipped")
    assert capsys.readouterr().err.endswith("WARNING topic \\x1b[2J skipped\n")
