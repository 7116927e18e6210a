"""SQL over messages: headers, properties and bodies.

Owns the view that a query sees and which columns are read for it. The engine is Spark's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.options.columns import COLUMNS, DEFAULT_NAMES
from pipeline.options.source_options import SourceOptions
from pipeline.source.planned_frame import frame_of
from tiered.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEW = "messages"
TEXT = "text"
"""The body as text; bytes that are no UTF-8 are replaced."""
SHOWN = ("topic", "queueId", "queueOffset", "storeTimestamp", "tags", "keys", TEXT)

_WRONG_DATA = re.compile(
    r"\[[A-Z_.]+\] [^\[]{1,500}? SQLSTATE: (?:22|42|P0)\w{3}|(?<=PatternSyntaxException: )[^\n]+"
)
"""An error of Spark's whose class is the query's or its values' fault."""


@dataclass(frozen=True)
class Question:
    """What to look for.

    Either ``sql`` over the view ``messages``, or any of: ``where``, a condition; ``body``, a regular expression that
    the body's text must match somewhere; ``select``, the columns to show.
    """

    sql: str = ""
    where: str = ""
    body: str = ""
    select: tuple[str, ...] = SHOWN
    limit: int = 0


def search(spark: SparkSession, source: SourceOptions, question: Question) -> DataFrame:
    """The answer, not computed yet; columns besides those of the data source: ``text``.

    Raises UsageError for a question that contradicts itself or that Spark does not understand.
    """
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions

    if question.sql and (question.where or question.body):
        raise UsageError(
            "sql and a condition exclude each other", hint="write the condition into the WHERE of sql"
        )
    columns = columns_of(question)
    frame = frame_of(spark, replace(source, columns=columns))
    if "body" in columns:
        frame = frame.withColumn(TEXT, functions.expr("make_valid_utf8(CAST(body AS STRING))"))
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
        said = next(line for line in (*str(error).splitlines(), "no reason") if line.strip())
        raise UsageError(f"Spark does not understand it: {said.strip()}") from error
    return answer.limit(question.limit) if question.limit else answer


def fault_of_the_question(error: Exception) -> UsageError | None:
    """What rows revealed to be wrong with the question, such as a division by zero; None for any other error."""
    found = _WRONG_DATA.search(str(error))
    return None if found is None else UsageError(f"Spark cannot compute it: {' '.join(found[0].split())}")


def columns_of(question: Question) -> tuple[str, ...]:
    """The columns that must be read: those named; all that are read by default for a ``*``."""
    said = " ".join((question.sql or " ".join(question.select), question.where))
    is_whole = "*" in re.sub(r"(?i)count\s*\(\s*\*\s*\)", "", said)
    named = set(DEFAULT_NAMES) if is_whole else set()
    words = {word.lower() for word in re.findall(r"\w+", said)}
    named |= {name for name in COLUMNS if name.lower() in words}
    if TEXT in words or question.body or is_whole:
        named.add("body")
    named = named or {"storeTimestamp"}
    return tuple(name for name in COLUMNS if name in named)
