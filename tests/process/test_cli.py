"""The command line itself: dispatch, help, one-line errors, exit codes, what a start imports."""

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_tiered.cli import EXIT_CODES, VERBS, main
from tests.process.imported import STARTING, imported, libraries

ROOT = Path(__file__).parents[2]
LIBRARIES_OF = {
    "run": frozenset({"jinja2", "markupsafe", "prometheus_client", "yaml"}),
    "serve": frozenset({"jinja2", "markupsafe", "prometheus_client", "yaml"}),
    "mount": frozenset({"jinja2", "markupsafe", "prometheus_client", "yaml"}),
    "detach": frozenset({"prometheus_client", "yaml"}),
    "cost": frozenset({"prometheus_client"}),
    "config": frozenset({"yaml"}),
    "doctor": frozenset({"yaml"}),
    "backfill": frozenset({"tqdm", "yaml"}),
    "verify": frozenset({"tqdm"}),
    "repair": frozenset({"tqdm"}),
    "index": frozenset({"tqdm"}),
    "compact": frozenset({"tqdm"}),
    "consumequeue": frozenset({"tqdm"}),
    "republish": frozenset({"tqdm"}),
    "restore": frozenset({"tqdm"}),
    "export": frozenset({"tqdm"}),
    "gc": frozenset({"tqdm"}),
    "sql": frozenset({"tqdm"}),
    "compact-keys": frozenset({"tqdm"}),
}


def test_help_lists_every_verb_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(verb in text for verb in VERBS)
    assert EXIT_CODES in text


@pytest.mark.parametrize(
    "arguments", [[], ["sing"], ["config"], ["config", "chck"], ["config", "check", "--sett", "x"]]
)
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("tiered ")


def test_config_check_prints_values_and_origins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_OFFLOAD__BATCH_BYTES", "1MiB")
    assert main(["config", "check", "--json", "--region", "eu-1", "--set", "admin.port=0"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["offload.batch_bytes"] == {"value": 1 << 20, "from": "TIERED_OFFLOAD__BATCH_BYTES"}
    assert printed["object_store.region"] == {"value": "eu-1", "from": "--region"}
    assert printed["admin.port"] == {"value": 0, "from": "--set admin.port"}
    assert printed["gc.grace_ms"]["from"] == "default"


def test_every_flag_that_a_message_names_exists() -> None:
    known = {"--help", "--version", "--debug"}
    for module, _ in VERBS.values():
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(module).add_arguments(parser)
        known |= {option for action in parser._actions for option in action.option_strings}
    texts = (
        (path, node.value)
        for package in ("tiered", "uploader", "fetcher", "rocketmq_tiered")
        for path in (ROOT / package).rglob("*.py")
        if "spark" not in path.parts  # has a command line of its own
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    named = {
        (path.name, flag) for path, text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
    }
    assert len(named) > 30
    assert not {name for name in named if name[1] not in known}


@pytest.mark.parametrize("flag", ["--url", "--store", "--state-dir", "--broker-conf", "--bind"])
def test_config_check_takes_the_flags_of_run(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = "127.0.0.1:10921" if flag == "--bind" else "file:///x"
    assert main(["config", "check", flag, value, "--include-system", "--take-over", "--json"]) == 0
    found = [key for key, said in json.loads(capsys.readouterr().out).items() if said["value"] == value]
    assert len(found) == 1


@pytest.mark.parametrize("target", ["/dev/full", "&-"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_output_to_a_closed_pipe_is_no_internal_error(target: str, form: list[str]) -> None:
    command = shlex.join([sys.executable, "-m", "rocketmq_tiered.cli", "config", "check", *form])
    done = subprocess.run(
        f"{command} >{target}", shell=True, capture_output=True, text=True, check=False, cwd=ROOT
    )
    full = (4, "tiered: cannot write the output: No space left on device\n")
    assert (done.returncode, done.stderr) == (full if target == "/dev/full" else (0, ""))


def test_with_stderr_closed_errors_do_not_get_among_the_data() -> None:
    command = shlex.join(
        [sys.executable, "-m", "rocketmq_tiered.cli", "config", "check", "--set", "no.such=1"]
    )
    done = subprocess.run(
        f"{command} 2>&-", shell=True, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    "assignment",
    ["archive.url=s3://AKID:hush@bucket/x", "object_store.endpoint_url=http://AKID:hush@minio:9000"],
)
@pytest.mark.parametrize("verb", ["config", "run"])
def test_secrets_in_addresses_are_refused_and_not_repeated(
    verb: str, assignment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        ["config", "check"]
        if verb == "config"
        else ["run", "--store", str(tmp_path), "--set", "archive.url=s3://b"]
    )
    assert main([*arguments, "--set", assignment]) == 2
    said = capsys.readouterr()
    assert "hush" not in said.out + said.err and "contains credentials" in said.err


@pytest.mark.parametrize("url", ["ftp://x", "bucket", "file://relative"])
def test_config_check_tells_a_wrong_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--set", f"archive.url={url}"]) == 2
    assert capsys.readouterr().err.startswith(f"tiered: {url} is not an a")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("offload.dictionary=1", "offload.dictionary (--set offload.dictionary) is not supported"),
        ("retention.ttl=soon", "retention.ttl = soon (--set retention.ttl) is invalid"),
        ("offload.batch_byte=1", "did you mean offload.batch_bytes?"),
        ("offload.batch_bytes=-1", "use a whole number of bytes"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_2(
    assignment: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", "--set", assignment]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tiered: ") and error.count("\n") == 1
    assert expected in error


def test_a_missing_configuration_file_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--config", "/nowhere/tiered.toml"]) == 3
    assert "/nowhere/tiered.toml" in capsys.readouterr().err


def test_debug_adds_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "--set", "a.b=1", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("allowed", [frozenset(), *set(LIBRARIES_OF.values())])
def test_every_verb_starts_with_few_libraries(allowed: frozenset[str]) -> None:
    """What a start costs is what it imports; benchmarks/one_shot.py has the seconds."""
    verbs = [verb for verb in sorted(VERBS) if LIBRARIES_OF.get(verb, frozenset()) == allowed]
    assert libraries(imported(*([verb, "--help"] for verb in verbs))) <= STARTING | allowed


def test_the_console_script_is_declared() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    assert 'tiered = "rocketmq_tiered.cli:main"' in text


def test_files_of_a_command_are_private_whatever_the_callers_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(_options: argparse.Namespace) -> int:
        (tmp_path / "file").write_text("")
        return 0

    monkeypatch.setattr("rocketmq_tiered.cli.ls.execute", execute)
    before = os.umask(0)
    try:
        assert main(["ls", "file:///archive"]) == 0
        assert os.umask(0) == 0, "the caller's is back"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
