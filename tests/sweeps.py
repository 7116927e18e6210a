"""Long parametrizations and many examples: a sample runs with the fast tests, the rest where there is time."""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

EXAMPLES_SHARE = float(os.environ.get("EXAMPLES_SHARE", "0.3"))
"""Each run draws other examples, so that many short runs try as many as a long one."""


def examples(count: int) -> int:
    """Examples of a property in this run: EXAMPLES_SHARE of ``count``."""
    return max(5, round(count * EXAMPLES_SHARE))


def sweep(values: Iterable[Any], *, fast: Collection[Any], rest: str = "soak") -> list[Any]:
    """Parameters of which only ``fast`` run with the fast tests; the others are marked ``rest``."""
    later = getattr(pytest.mark, rest)
    return [value if value in fast else _later(value, later) for value in values]


def _later(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*value, marks=mark) if isinstance(value, tuple) else pytest.param(value, marks=mark)
