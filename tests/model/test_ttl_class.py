"""TTL classes: the smallest that is not shorter."""

import pytest

from uploader.queue_ttl_classes import FOREVER_CLASS, ttl_class

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("hours", "days"),
    [
        (1, 1),
        (24, 1),
        (25, 3),
        (72, 3),
        (168, 7),
        (169, 14),
        (720, 30),
        (721, 90),
        (8760, 365),
        (8761, FOREVER_CLASS),
    ],
)
def test_a_time_to_live_has_the_smallest_class_that_is_not_shorter(hours: int, days: int) -> None:
    assert ttl_class(hours * HOUR_MS) == days


def test_what_never_expires_has_the_last_class() -> None:
    assert ttl_class(None) == FOREVER_CLASS
