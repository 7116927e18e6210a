"""A SQL92 filter as readers use it: record bytes in, kept or not out.

Owns the judgement: true keeps, false, unknown and failure drop (ExpressionMessageFilter.isMatchedByCommitLog).
"""

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.tag_filter import Properties, properties_bytes
from fetcher.sql92.java_values import ValueClashError
from fetcher.sql92.parser import parse


class Sql92Filter:
    """Keeps the messages for which ``expression`` is true. Implements MessageFilter. Thread-safe."""

    def __init__(self, expression: str, *, ignore_rest: bool = False) -> None:
        """Raises Sql92Error. ``ignore_rest``: like a broker, say nothing of what follows a complete expression."""
        self.expression = expression
        self._evaluate = parse(expression, ignore_rest=ignore_rest).compiled()

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
