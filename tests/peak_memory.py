"""The memory that Python allocates."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def peak_below(limit_bytes: int) -> Iterator[None]:
    """Whether what runs inside ``with`` allocates at most that at a time."""
    tracemalloc.start()
    try:
        yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= limit_bytes, f"{peak_bytes >> 20} MiB"
