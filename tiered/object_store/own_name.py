"""PUTs under names that nobody else makes: what "it exists already" means there.

Only commits are fought over; all other names carry an epoch and a number of their own. A store that says such a name is
taken has been sent our own PUT twice, by a proxy or a load balancer that lost the first answer. Whether what is there
is whole nobody asks (NonStopWrite): it counts as unanswered, and the caller goes on under another name.
"""

from __future__ import annotations

from tiered.errors import AlreadyExistsError, UnansweredError
from tiered.object_store.interface import Body, ObjectStore


def put_own(store: ObjectStore, key: str, body: Body, *, timeout_s: float | None = None) -> None:
    """``put_if_absent`` that raises UnansweredError where that raises AlreadyExistsError."""
    try:
        store.put_if_absent(key, body, timeout_s=timeout_s)
    except AlreadyExistsError as error:
        raise UnansweredError(f"{error.message}: was it sent twice on its way?") from error
