"""SQL over messages: the view of a query, and the columns that are read for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rocketmq_tiered.message_table.options.columns import COLUMNS, DEFAULT_NAMES
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.spark.source.reading import frame_of
from tiered.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEW = "messages"
TEXT = "text"
SHOWN = ("topic", "queueId", "queueOffset", "storeTimestamp", "tags", "keys", TEXT)

_WRONG_DATA = re.compile(
    r"\[[A-Z_.]+\] [^\[]{1,500}? SQLSTATE: (?:22|42|P0)\w{3}|(?<=PatternSyntaxException: )[^\n]+"
)
"""Spark errors caused by the query or its values, by SQLSTATE class."""


@dataclass(frozen=True)
class Question:
    """A search: either ``sql`` over the view ``messages``, or a condition.

    ``where``: an SQL condition; ``body``: a regular expression found in the body's text; ``select``: columns to show.
    """

    sql: str = ""
    where: str = ""
    body: str = ""
    select: tuple[str, ...] = SHOWN
    limit: int = 0


def search(spark: SparkSession, source: SourceOptions, question: Question) -> DataFrame:
    """The result, not computed yet. The view has all columns of the data source, and ``text``.

    Raises UsageError for a contradictory question or one that Spark cannot parse.
    """
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions

    if question.sql and (question.where or question.body):
        raise UsageError(
            "sql excludes where and body", hint="put the condition into the WHERE clause of the query"
        )
    frame = frame_of(spark, replace(source, columns=columns_of(question)))
    try:
        if question.sql:
            frame.createOrReplaceTempView(VIEW)
            answer = spark.sql(question.sql)
        else:
            if question.body:
                frame = frame.where(functions.col(TEXT).rlike(question.body))
            if question.where:
                frame = frame.where(question.where)
            answer = frame.select(*question.select)
    except (AnalysisException, ParseException) as error:
        reason = next(line for line in (*str(error).splitlines(), "no reason") if line.strip())
        raise UsageError(f"Spark cannot parse the query: {reason.strip()}") from error
    return answer.limit(question.limit) if question.limit else answer


def fault_of_the_question(error: Exception) -> UsageError | None:
    """An error of the query that only rows reveal, such as a division by zero; None for any other error."""
    found = _WRONG_DATA.search(str(error))
    return None if found is None else UsageError(f"the query failed: {' '.join(found[0].split())}")


def columns_of(question: Question) -> tuple[str, ...]:
    """The columns to read: those named in the question, and the default ones for a ``*``."""
    query = " ".join((question.sql or " ".join(question.select), question.where))
    is_whole = "*" in re.sub(r"(?i)count\s*\(\s*\*\s*\)", "", query)
    named = set(DEFAULT_NAMES) if is_whole else set()
    words = {word.lower() for word in re.findall(r"\w+", query)}
    named |= {name for name in COLUMNS if name.lower() in words}
    if question.body or is_whole:
        named.add(TEXT)
    named = named or {"storeTimestamp"}
    return tuple(name for name in COLUMNS if name in named)
