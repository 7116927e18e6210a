"""Retired words, listed in tests/retired_words.md, do not come back: neither in text nor in names.

`python -m tests.test_language [PATH …]` prints each occurrence, and the number in each package.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest

from tiered.settings.sections import SECTIONS

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DEPLOYMENT = (
    "deploy",
    "localstack",
    "docker-compose.yml",
    "Dockerfile",
    "Makefile",
    "pyproject.toml",
    ".ci",
    ".github",
)
PACKAGES: dict[str, tuple[str, ...]] = {
    "docs": DOCUMENTS,
    "deploy": DEPLOYMENT,
    **{
        name: (name,)
        for name in ("examples", "benchmarks", "tiered", "uploader", "fetcher", "rocketmq_tiered", "tests")
    },
}
FINISHED = (
    "docs",
    "deploy",
    "examples",
    "benchmarks",
    "fetcher",
    "rocketmq_tiered",
    "tiered",
    "uploader",
    "tests",
)
"""Packages without retired words. A package stays in this list once it is in it."""

RETIRED_WORDS = "tests/retired_words.md"
TEXT_SUFFIXES = {"", ".md", ".yml", ".yaml", ".toml", ".conf", ".json", ".service", ".timer", ".sh"}
EXEMPT_FILES = {
    RETIRED_WORDS,
    "docs/SETTINGS.md",
    "tests/test_language.py",
}  # SETTINGS.md is generated from tiered/
OUTSIDE = (
    r"\(3a\b",
    r"(?<!\w)seed 00\d",
    r"(?<!\w)seed \d\.\d",
    r"(?<!\w)invariant \d",
    r"(?<!\w)design rules?(?!\w)",
)
"""References to documents that are not part of the project: state the rule, or link into docs/."""
WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_+")
JOINED = re.compile(r"""["']\s*[a-z]?["']|\\n""")
"""Between two parts of one string, and a line end in it."""


class Found(NamedTuple):
    """One occurrence of a retired word."""

    path: str
    line: int
    word: str
    text: str


def section(document: str, title: str) -> str:
    """The text below the heading ``title`` of a document in docs/."""
    text = (ROOT / "docs" / document).read_text("utf-8")
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/{document} has no section {title}"
    return found[1]


def pattern(phrase: str) -> str:
    """The regular expression of a phrase: `*` is any ending, words may be on two lines."""
    return re.escape(phrase).replace(r"\*", r"\w*").replace(r"\ ", r"\s+(?:#\s+)?")


def any_of(phrases: list[str]) -> str:
    """Phrases in lower case, by their first letter: one search for each phrase takes thirty times as long."""
    by_letter = groupby(sorted(phrase.lower() for phrase in phrases), key=lambda phrase: phrase[0])
    groups = (rf"(?={re.escape(letter)})(?:{'|'.join(map(pattern, some))})" for letter, some in by_letter)
    return rf"(?<!\w)(?:{'|'.join(groups)})(?!\w)"


@functools.cache
def retired() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What is retired, and the phrases that are allowed although they contain a retired word."""
    words: list[str] = []
    allowed: list[str] = []
    for row in re.findall(r"^\| (`.*) \|$", (ROOT / RETIRED_WORDS).read_text("utf-8"), re.MULTILINE):
        cells = row.split(" |")
        words += re.findall(r"`([^`]+)`", cells[0])
        allowed += re.findall(r"`([^`]+)`", cells[2])
    assert words and allowed
    return re.compile("|".join([any_of(words), *OUTSIDE])), re.compile(any_of(allowed))


@functools.cache
def exempt_names() -> frozenset[str]:
    """Names of settings."""
    return frozenset(setting.name for section_type in SECTIONS.values() for setting in fields(section_type))


@functools.cache
def quoted_names() -> re.Pattern[str]:
    """Exempt names in quotes."""
    return re.compile(rf"(?<=[`'\"])(?:{'|'.join(sorted(exempt_names()))})(?=[`'\"])")


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """(position, word) of each retired word in prose."""
    words, allowed = retired()
    text = quoted_names().sub(lambda hit: " " * len(hit[0]), text)
    text = allowed.sub(lambda hit: "·" * len(hit[0]), text.lower())
    for hit in words.finditer(text):
        yield hit.start(), hit[0]


@functools.cache
def found_in_name(name: str) -> str | None:
    """The retired word in an identifier, if any."""
    if name in exempt_names():
        return None
    return next((word for _, word in found_in(WORD_BREAK.sub(" ", name).strip().lower())), None)


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a module gives a name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str() as name):
                yield 1, name
            case _:
                pass


def may_contain(source: str) -> bool:
    """Whether a retired word stands anywhere in the text of a module: parsing takes longer than this search."""
    text = JOINED.sub(lambda hit: " " if hit[0] == r"\n" else "", source)
    return any(next(found_in(searched), None) for searched in (text, WORD_BREAK.sub(" ", text)))


def found_in_python(path: Path) -> Iterator[Found]:
    """Retired words in names, strings, docstrings and comments of a module."""
    source, relative = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    if word := found_in_name(path.stem):
        yield Found(relative, 0, word, path.name)
    if not may_contain(source):
        return
    tree = ast.parse(source)
    for line, name in sorted(set(names_in(tree))):
        if word := found_in_name(name):
            yield Found(relative, line, word, name)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value not in exempt_names()
        ):
            for position, word in found_in(node.value):
                line = node.lineno + node.value[:position].count("\n")
                yield Found(relative, line, word, _around(node.value, position))
    comments = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    text = "\n".join(token.string for token in comments)
    for position, word in found_in(text):
        yield Found(relative, comments[text[:position].count("\n")].start[0], word, _around(text, position))


def found_in_text(path: Path) -> Iterator[Found]:
    """Retired words in a document or a configuration file."""
    text = path.read_text("utf-8")
    for position, word in found_in(text):
        yield Found(
            path.relative_to(ROOT).as_posix(), text[:position].count("\n") + 1, word, _around(text, position)
        )


def _around(text: str, position: int) -> str:
    return " ".join(text[max(0, position - 40) : position + 50].split())


def found_below(*places: str) -> list[Found]:
    """Retired words in files and directories."""
    found: list[Found] = []
    for place in places:
        start = ROOT / place
        for path in sorted(start.rglob("*")) if start.is_dir() else [start]:
            if (
                not path.is_file()
                or path.relative_to(ROOT).as_posix() in EXEMPT_FILES
                or "data" in path.parts
            ):
                continue
            if path.suffix == ".py":
                found += found_in_python(path)
            elif path.suffix in TEXT_SUFFIXES:
                found += found_in_text(path)
    return found


@pytest.mark.parametrize("package", FINISHED)
def test_no_retired_words(package: str) -> None:
    found = [
        f"{item.path}:{item.line} '{item.word}': {item.text}" for item in found_below(*PACKAGES[package])
    ]
    assert not found, f"see {RETIRED_WORDS}:\n" + "\n".join(found)


def test_text_and_names_are_searched() -> None:
    assert [word for _, word in found_in("The Light\nqueues were read anew; `max_share` stays")] == [
        "light\nqueues",
        "anew",
    ]
    assert found_in_name("BeyondHand") == "beyond hand"
    assert found_in_name("light_queue_names") == "light queue"
    assert found_in_name("by_hand") is None
    assert all(
        map(may_contain, ('"light "\n  f"queue"', r'"light\nqueue"', "lightQueues = 1", "# light queue"))
    )
    assert not may_contain("light_of_queues")
    assert not list(found_in("no more than ten, newer, renewed, handle"))


if __name__ == "__main__":
    everything = {package: found_below(*(sys.argv[1:] or places)) for package, places in PACKAGES.items()}
    for package, found in everything.items():
        for item in found if package in FINISHED or sys.argv[1:] else ():
            print(f"{item.path}:{item.line} '{item.word}': {item.text}")
        if sys.argv[1:]:
            break
    for package, found in everything.items():
        print(f"{len(found):5} {package}", dict(Counter(item.word.lower() for item in found).most_common(12)))
