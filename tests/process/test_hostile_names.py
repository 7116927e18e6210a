"""Names with terminal escape sequences, control and bidirectional characters, printed by every command: escaped, while
JSON keeps their value and raw records their bytes."""

import json
import logging
import unicodedata
from collections.abc import Callable

import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.cli.rendering import BodyForm, jsonl_line
from rocketmq_tiered.process.logs import JsonFormatter
from tests.fetcher.broker_store_writer import WrittenStore
from tests.kernels.record_builder import Message, encode, properties
from tiered.console import PlainFormatter
from tiered.model.queue import QueueKey

Run = Callable[..., tuple[int, str, str]]
TITLE_CHANGE = "\x1b]0;owned\x07"
NAME = f"t{TITLE_CHANGE}\u202egnp\x9b2J\r\nforged\x7f"
SHOWN = r"t\x1b]0;owned\x07\u202egnp\x9b2J\r\nforged\x7f"
NAMES = ("--cluster", "c", "--broker", "b")


def is_clean(text: str) -> bool:
    """No character but line breaks acts on a terminal or hides."""
    acting = ("Cc", "Cf", "Zl", "Zp")
    return not any(unicodedata.category(character) in acting for character in text.replace("\n", ""))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WrittenStore:
    written = WrittenStore(tmp_path_factory.mktemp("broker") / "store")
    for body in (b"1", b"2"):
        written.put(NAME, 0, body, tags=NAME)
    return written


@pytest.fixture(scope="module")
def archive(store: WrittenStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One topic with such a name."""
    url = f"file://{tmp_path_factory.mktemp('archive')}"
    assert main(["backfill", str(store.path), url, *NAMES, "--json"]) == 0
    return url


@pytest.mark.parametrize(
    "arguments",
    [
        ("cat", "{url}", f"absent{NAME}"),
        ("offset", "{url}", f"absent{NAME}", "--time", 0),
        ("ls", "{url}", "--topic", f"absent{NAME}"),
        ("query", "{url}", "--topic", NAME, "--key", "none"),
        ("status", "{url}", f"--{NAME}"),
        ("verify", f"file:///no/such{NAME}"),
        ("reset-offset", "--serve", NAME, "--group", "g", "--topic", "t", "--earliest"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_error_is_one_clean_line(run: Run, archive: str, arguments: tuple[object, ...]) -> None:
    code, out, error = run(*(str(one).replace("{url}", archive) for one in arguments))
    assert (code != 0, out) == (True, "")
    assert is_clean(error) and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "{url}", "--due"),
        ("ls", "{url}", "--by-topic", "--due"),
        ("ls", "{url}", "--topic", "*"),
        ("cost", "{url}"),
        ("expire", "{url}", "--topic", NAME, "--all"),
        ("compact", "{url}"),
        ("gc", "{url}"),
        ("doctor", "{url}", "--store", "{store}"),
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[2:3]),
)
def test_what_lists_topics_is_clean_as_text_and_as_json(
    run: Run, archive: str, store: WrittenStore, arguments: tuple[str, ...]
) -> None:
    words = [word.format(url=archive, store=store.path) for word in arguments]
    _, out, error = run(*words)
    assert is_clean(out + error) and (SHOWN in out) is (arguments[0] in ("ls", "cost", "expire"))
    _, out, error = run(*words, "--json")
    assert is_clean(out + error) and json.loads(out) is not None


def test_a_body_as_text_is_one_clean_line_with_the_same_value() -> None:
    message = Message(b"t", 0, 7, NAME.encode(), properties((b"KEYS", b"\xc2\x9b2J")))
    line = jsonl_line(encode(message, 0), QueueKey("t", 0, 0), 7, body_form=BodyForm("text")).decode()
    assert is_clean(line) and line.count("\n") == 1
    assert json.loads(line)["body"] == NAME


@pytest.mark.parametrize("formatter", [PlainFormatter(), JsonFormatter()])
def test_log_entries_are_clean(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, "topic %s", (NAME,), None)
    vars(record).update(topic=NAME)
    line = formatter.format(record)
    assert is_clean(line) and "\n" not in line and "owned" in line
