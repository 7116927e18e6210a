"""Evaluates an SQL92 expression over properties, for tests."""

from fetcher.sql92.java_values import ValueClashError
from fetcher.sql92.parser import Sql92Error, parse

WORDS = {True: "true", False: "false", None: "null"}


def judged(text: str, message: dict[str, str]) -> str:
    """Our answer in the broker's words."""
    try:
        tree = parse(text, ignore_rest=True)
    except Sql92Error:
        return "invalid"
    try:
        return WORDS[tree.compiled()(message.get)]  # type: ignore[index]
    except ValueClashError:
        return "error"
