"""Advice in messages: the commands and flags that it names exist, and a verification that it advises reads the data."""

import ast
import re
from pathlib import Path

import pytest

from tests.shared_files import verb_parsers

ROOT = Path(__file__).parents[2]
PRODUCT = ("tiered", "uploader", "fetcher", "rocketmq_tiered")
ADVISING = {"hint", "step", "fix"}
COMMAND = re.compile(
    r"(?<![\w-])tiered ([a-z][a-z-]*)((?: (?:--[a-z-]+|[A-Z][A-Z_:]*|ls|build|verify|s3://\S+|\d+h))*)"
)
OWN_FLAGS = {"--debug", "--help", "--version"}


def _texts() -> list[tuple[str, str]]:
    """(place, text) of each text that an error or a finding gives as the next step; values are an ellipsis."""
    found = []
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.keyword) and node.arg in ADVISING:
                    parts = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
                    text = "…".join(str(part) for part in parts)
                    found.append((f"{path.relative_to(ROOT)}:{node.value.lineno}", text))
    return found


TEXTS = _texts()


def test_commands_in_advice_exist_and_take_their_flags() -> None:
    parsers = verb_parsers()
    wrong, commands = [], 0
    for place, text in TEXTS:
        for verb, words in COMMAND.findall(text):
            known = parsers.get(verb)
            commands += 1
            flags = re.findall(r"--[a-z-]+", words)
            if known is None or not {*flags} <= known | OWN_FLAGS:
                wrong.append(f"{place}: tiered {verb}{words}")
    assert commands > 20 and not wrong, "\n".join(wrong)


def test_flags_in_advice_exist() -> None:
    every = set().union(*verb_parsers().values()) | OWN_FLAGS | {"--conf", "--list", "--option"}
    named = {(place, flag) for place, text in TEXTS for flag in re.findall(r"(?<!\S)--[a-z][a-z-]+", text)}
    assert len(named) > 20
    assert not {(place, flag) for place, flag in named if flag not in every}


@pytest.mark.parametrize("package", PRODUCT)
def test_a_verification_that_finds_damage_reads_the_data(package: str) -> None:
    """Without --full `tiered verify` reads no messages."""
    short = re.compile(
        r'"[^"]*tiered verify(?! ARCHIVE_URL --full| ARCHIVE_URL lists what is missing)[^"]*damage'
    )
    for path in (ROOT / package).rglob("*.py"):
        assert not short.search(path.read_text("utf-8")), path
