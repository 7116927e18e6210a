"""A SQL92 filter as readers use it: record bytes in, kept or not out.

Owns the judgement: true keeps, false, unknown and failure drop (ExpressionMessageFilter.isMatchedByCommitLog).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.record_properties import Properties, properties_bytes
from fetcher.sql92.evaluation import compile_expression
from fetcher.sql92.java_values import ValueClashError
from fetcher.sql92.parser import parse

COMPILED_CHARS_MAX: Final = 256 * 1024
FILTER_CHARS: Final = 32
"""A filter weighs as much as so many characters more."""


class Sql92Filter:
    """Keeps the messages for which ``expression`` is true. Implements MessageFilter. Thread-safe."""

    def __init__(self, expression: str, *, ignore_rest: bool = False) -> None:
        """Raises Sql92Error. ``ignore_rest``: like a broker, say nothing of what follows a complete expression."""
        self.expression = expression
        self._evaluate = compile_expression(parse(expression, ignore_rest=ignore_rest))

    def __repr__(self) -> str:
        return f"Sql92Filter({self.expression!r})"

    def tags_mask(self, tags_code: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """None: nothing is known before the properties are read."""
        return None

    def keep(self, record: memoryview) -> bool:
        """Whether this record matches. Raises CorruptionError for a record without properties to be found."""
        return self.matches(properties_bytes(record))

    def matches(self, stored_properties: bytes) -> bool:
        """The same for the properties alone, as stored."""
        try:
            return self._evaluate(Properties(stored_properties)) is True
        except ValueClashError:
            return False


class CompiledFilters:
    """Filters by expression, those used last: expressions of ``chars_max`` together, since compiled they take fifty
    times their text. A single larger one is compiled each time. Thread-safe."""

    def __init__(self, chars_max: int = COMPILED_CHARS_MAX) -> None:
        self._chars_max = chars_max
        self._lock = threading.Lock()
        self._filters: OrderedDict[tuple[str, bool], Sql92Filter] = OrderedDict()
        self.held_chars = 0

    def find(self, expression: str, *, ignore_rest: bool) -> Sql92Filter:
        """The filter. Raises Sql92Error."""
        key = expression, ignore_rest
        with self._lock:
            found = self._filters.get(key)
            if found is not None:
                self._filters.move_to_end(key)
                return found
        found = Sql92Filter(expression, ignore_rest=ignore_rest)
        with self._lock:
            if key not in self._filters and len(expression) < self._chars_max:
                self._filters[key] = found
                self.held_chars += FILTER_CHARS + len(expression)
            while self.held_chars > self._chars_max:
                (oldest, _), _ = self._filters.popitem(last=False)
                self.held_chars -= FILTER_CHARS + len(oldest)
        return found


_compiled = CompiledFilters()


def compiled(expression: str, ignore_rest: bool = False) -> Sql92Filter:
    """A filter compiled once: clients send the same expression with every pull. Raises Sql92Error."""
    return _compiled.find(expression, ignore_rest=ignore_rest)
