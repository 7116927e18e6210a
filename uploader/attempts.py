"""NonStopWrite: the next step after each answer, or no answer, to a data PUT. Pure.

- No answer in time, connection lost, 5xx: the attempt is abandoned and never checked; a new one under its own key
  starts at once. The third failure in a row backs off.
- Refused without effect (429, 503, connection refused, disk full): back off with jitter.
- 400, 403, 404: stop and alarm; a retry cannot help.
"""

from dataclasses import dataclass

from tiered.errors import UnansweredError, UnavailableError

IMMEDIATE_RETRIES = 2


@dataclass(frozen=True)
class AttemptPolicy:
    """Bounds on timeouts and waits between attempts, in ms; ``rate_bytes_per_s_floor``: the slowest upload that is not
    taken for a lost one."""

    timeout_ms_min: int = 2_000
    timeout_ms_max: int = 30_000
    backoff_ms_first: int = 100
    backoff_ms_max: int = 15_000
    rate_bytes_per_s_floor: int = 4 << 20


def attempt_timeout_ms(policy: AttemptPolicy, size_bytes: int, consecutive_failures: int) -> int:
    """How long an attempt to put ``size_bytes`` waits for its answer: as long as that takes at the lowest rate of
    ``policy``, doubled for each failure in a row after the first, up to a maximum. One unanswered attempt means a lost
    connection, several mean a slow store.
    """
    transfer_ms = size_bytes * 1000 // policy.rate_bytes_per_s_floor
    timeout_ms = (policy.timeout_ms_min + transfer_ms) << min(max(consecutive_failures - 1, 0), 8)
    return min(policy.timeout_ms_max, timeout_ms)


def retry_delay_ms(
    policy: AttemptPolicy, error: Exception, consecutive_failures: int, jitter: float
) -> int | None:
    """After how long a PUT that failed with ``error`` is tried again; None: it is not, as a retry cannot help.
    ``consecutive_failures``: how many failed in a row, this one included. ``jitter``, in [0, 1), spreads the retries of
    several writers."""
    if not isinstance(error, UnavailableError):
        return None  # such as a missing permission
    if isinstance(error, UnansweredError) and consecutive_failures <= IMMEDIATE_RETRIES:
        return 0
    exponent = consecutive_failures - 1
    if isinstance(error, UnansweredError):
        exponent -= IMMEDIATE_RETRIES  # the first retries did not wait
    ceiling_ms = min(policy.backoff_ms_max, policy.backoff_ms_first << min(max(exponent, 0), 16))
    return int(ceiling_ms * (0.5 + jitter / 2))
