"""Compiles a subscription's filter, TAG or SQL92."""

from __future__ import annotations

from fetcher.rows.tag_filter import ANY_TAG, MessageFilter, tag_filter
from fetcher.sql92.message_filter import compiled
from server.groups.client_table import SQL92, TAG
from tiered.errors import UsageError


def filter_of(expression: str, expression_type: str) -> MessageFilter | None:
    """None if every message matches. Raises UsageError for an expression that does not parse."""
    if expression_type == SQL92 and expression != ANY_TAG:
        return compiled(expression, ignore_rest=True)
    if expression_type not in (TAG, SQL92):
        raise UsageError(f"expression type {expression_type[:40]} is neither TAG nor SQL92")
    return tag_filter(expression)
