"""Errors of the data source in Spark's Python processes: their message without a trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from tiered.errors import TieredError

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def short_trace() -> Iterator[None]:
    """Spark prints the trace of an error that ends one of its processes: omit its frames. Errors of ours name what is
    wrong."""
    try:
        yield
    except TieredError:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name.startswith("pyspark."):
            sys.tracebacklimit = 0
        raise


def with_short_trace(method: Callable[P, R]) -> Callable[P, R]:
    """``method`` with ``short_trace``."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with short_trace():
            return method(*args, **kwargs)

    return called
