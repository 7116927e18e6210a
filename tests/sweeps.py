"""Long parametrizations: a sample runs with the fast tests, the rest where there is time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], *, fast: Collection[Any], rest: str = "soak") -> list[Any]:
    """Parameters of which only ``fast`` run with the fast tests; the others are marked ``rest``."""
    later = getattr(pytest.mark, rest)
    return [value if value in fast else _later(value, later) for value in values]


def _later(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*value, marks=mark) if isinstance(value, tuple) else pytest.param(value, marks=mark)
