"""Compiles subscriptions' filters, TAG or SQL92, once for each expression."""

import asyncio
from typing import Final

from fetcher.rows.pull import PullRequest
from fetcher.rows.tag_filter import ANY_TAG, EXPRESSION_CHARS_MAX, MessageFilter, tag_filter
from fetcher.sql92.message_filter import Sql92Filter
from rocketmq_tiered.server.groups.client_table import SQL92, TAG
from rocketmq_tiered.server.wire.turns import Turns
from tiered.errors import UsageError
from tiered.model.lru import Lru

COMPILED_CHARS_MAX: Final = 256 * 1024
FILTER_CHARS: Final = 32
"""A filter weighs as much as so many characters more."""


def filter_of(expression: str, expression_type: str) -> MessageFilter | None:
    """Return the filter of an expression, None if every message matches it. Raises UsageError for an expression that
    does not parse or is too long, and for an expression type other than TAG and SQL92."""
    if expression_type == SQL92 and expression != ANY_TAG:
        return Sql92Filter(expression, ignore_rest=True)
    if expression_type not in (TAG, SQL92):
        raise UsageError(f"expression type {expression_type[:40]} is neither TAG nor SQL92")
    return tag_filter(expression)


class CompiledFilters:
    """Filters by expression, those used last: COMPILED_CHARS_MAX of expressions, since compiled they take fifty times
    their text. Belongs to one event loop."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._filters: Lru[tuple[str, str], MessageFilter | None] = Lru(COMPILED_CHARS_MAX)

    @property
    def held_chars(self) -> int:
        """What the filters weigh."""
        return self._filters.held_bytes

    async def find(self, request: PullRequest) -> MessageFilter | None:
        """Return the compiled filter of a pull, None if every message matches. One that is not known yet is compiled
        when it is the client's turn, so that no client occupies the server with filters. Raises UsageError for an
        expression that does not parse."""
        expression, expression_type = request.expression, request.expression_type
        if expression_type == TAG and expression in ("", ANY_TAG):
            return None
        key = expression, expression_type
        if key not in self._filters:
            if len(expression) > EXPRESSION_CHARS_MAX:
                return filter_of(expression, expression_type)  # raises at once, without reading the text
            await asyncio.wrap_future(self._turns.turn(request.client))
            if key not in self._filters:  # another pull may have compiled it while this one waited
                compiled = filter_of(expression, expression_type)
                self._filters.add(key, compiled, FILTER_CHARS + len(expression))
                return compiled
        return self._filters.get(key)
