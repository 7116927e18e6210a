"""Puts one version of the catalog until the outcome is known.

PUT version
  created                  → won
  refused, busy            → the same bytes again, later
  no response              → read the version back: ours → won, another's → lost, absent → the same bytes again
  exists                   → read the winner: our put id → won, else lost
"""

from tiered.catalog.catalog_reader import read_commit
from tiered.catalog.commit import Commit
from tiered.catalog.store_retry import StoreRetry
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import AlreadyExistsError, NotFoundError, UnansweredError, UnavailableError
from tiered.formats.keys import catalog_key
from tiered.object_store.interface import Body, ObjectStore


class CommitAttempt:
    """The attempts of one actor. Waits for an unavailable store as long as ``retry`` does."""

    def __init__(self, store: ObjectStore, limits: CatalogLimits, retry: StoreRetry) -> None:
        self._store = store
        self._limits = limits
        self._retry = retry

    def is_won(self, commit: Commit, body: Body) -> bool:
        """Put ``commit``, encoded as ``body``, as the object of its catalog version, again and again until it is known
        whether it exists. False: another commit has that version. Raises what ``StoreRetry.back_off`` raises."""
        key = catalog_key(commit.version)
        timeout_s = self._limits.timeout_s(sum(map(len, body)))
        failures = 0
        while True:
            try:
                self._store.put_if_absent(key, body, timeout_s=timeout_s)
                self._retry.retry_reason = ""
                return True
            except AlreadyExistsError:
                winner = self._retry.call(lambda: read_commit(self._store, commit.version))
                return winner.put_id == commit.put_id
            except UnansweredError as error:
                # The store may have created the object before the response was lost.
                stored = self._read_back(commit.version)
                if stored is not None:
                    self._retry.retry_reason = ""
                    return stored.put_id == commit.put_id
                cause: UnavailableError = error
            except UnavailableError as error:
                cause = error
            failures += 1
            self._retry.back_off(failures, cause)

    def _read_back(self, version: int) -> Commit | None:
        """The commit that has ``version`` in the store; None: there is none, or it cannot be read now."""
        try:
            return read_commit(self._store, version)
        except (NotFoundError, UnavailableError):
            return None
