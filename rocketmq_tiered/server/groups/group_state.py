"""Snapshots of group offsets in the object store, and which server may write them.

Numbered snapshots under ``state/serve/``, newest first in a listing, each created only if absent: two servers cannot
both write version n, so the loser is fenced. The version that made a server the owner is kept while the previous owner
may wake up, however late, because it is the next one that owner would write; so is the version before, whose reply may
have been lost. They are removed like others once the previous owner released the groups or has certainly ended. A new
owner checks that it wrote the newest version: it may have waited so long that its version existed and was removed. A
snapshot is small (groups times queues) and written at
most once a flush interval, by one task.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tiered.clock import Clock
from tiered.errors import AlreadyExistsError, CorruptionError, FencedError, NotFoundError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.keys import SERVE_PREFIX, is_version_name, version_name
from tiered.formats.memory_bound import LARGE, stored_bytes_max
from tiered.model.queue import DEAD_PREFIX, RETRY_PREFIX
from tiered.object_store.interface import ObjectStore

KIND: Final = b"RMQTSERV"
VERSIONS_KEPT: Final = 8
GENERATION_SHIFT: Final = 32
_OWN_TOPICS: Final = (RETRY_PREFIX, DEAD_PREFIX)
"""Prefixes of topics that continue here, whatever generation was archived."""

Offsets = dict[tuple[str, str], dict[int, int]]
"""(group, topic) -> queue number (``queue_number``) -> next queue offset to consume."""
GenerationOf = Callable[[str, int], int]
"""Topic and queue id -> the served generation of the queue."""


class HeldLock(NamedTuple):
    """A queue, as clients name it, that a client of an orderly group has locked."""

    group: str
    broker: str
    topic: str
    queue_id: int
    client_id: str


def queue_number(queue_id: int, generation: int) -> int:
    """The number of a queue in offsets. A recreated topic restarts at 0, and its groups with it."""
    return queue_id + (generation << GENERATION_SHIFT)


def is_generation_of(number: int, queue_id: int) -> bool:
    """Whether ``number`` is any generation of the queue."""
    return number & ((1 << GENERATION_SHIFT) - 1) == queue_id


@dataclass(frozen=True)
class GroupSnapshot:
    """One version. ``owner``: random id of the process that wrote it; ``owner_name``: for messages."""

    version: int = 0
    owner: str = ""
    owner_name: str = ""
    renewed_ms: int = 0
    released: bool = False
    offsets: Offsets = field(default_factory=dict)
    first_version: int = 0
    """The owner removes later versions only: this one made it the owner, or is the last before that."""
    lease: str = ""
    """The lease of a node that keeps the groups; empty: each version renews them."""
    locks: tuple[HeldLock, ...] | None = None
    """The locks on which clients rely, in a released version; None: they are unknown."""


def snapshot_key(version: int) -> str:
    """Key of a version; newer versions sort first."""
    return f"{SERVE_PREFIX}{version_name(version)}"


def encode_snapshot(snapshot: GroupSnapshot) -> bytes:
    """Return the bytes of the object that ``snapshot`` is stored as."""
    rows = [
        [group, topic, sorted(queues.items())] for (group, topic), queues in sorted(snapshot.offsets.items())
    ]
    header = {
        "version": snapshot.version,
        "owner": snapshot.owner,
        "owner_name": snapshot.owner_name,
        "renewed_ms": snapshot.renewed_ms,
        "released": snapshot.released,
        "offsets": rows,
        "first_version": snapshot.first_version,
        "lease": snapshot.lease,
        "locks": snapshot.locks,
    }
    return encode_container(KIND, header, {})


def decode_snapshot(data: bytes, *, source: str) -> GroupSnapshot:
    """Return the snapshot in an object's bytes. Raises CorruptionError or UnsupportedFormatError with the object's
    address ``source``."""
    header = decode_container(data, KIND, source=source, allowance=LARGE).header
    try:
        offsets = {
            (str(group), str(topic)): {int(queue): int(offset) for queue, offset in queues}
            for group, topic, queues in header["offsets"]
        }
        return GroupSnapshot(
            int(header["version"]),
            str(header["owner"]),
            str(header["owner_name"]),
            int(header["renewed_ms"]),
            bool(header["released"]),
            offsets,
            int(header["first_version"]),
            str(header["lease"]),
            None
            if header["locks"] is None
            else tuple(
                HeldLock(str(group), str(broker), str(topic), int(queue_id), str(client_id))
                for group, broker, topic, queue_id, client_id in header["locks"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{source}: this snapshot of the consumer groups' offsets is damaged: {error!r}"
        ) from error


def load_snapshot(store: ObjectStore) -> GroupSnapshot:
    """Return the newest snapshot in ``store``, or an empty one of version 0 if there is none."""
    key = newest_key(store)
    if key is None:
        return GroupSnapshot()
    try:
        return decode_snapshot(store.get(key, stored_bytes_max()), source=f"{store.url}/{key}")
    except NotFoundError:
        return load_snapshot(store)  # replaced by a newer version since the listing


def newest_key(store: ObjectStore) -> str | None:
    """Return the key of the newest snapshot, None without any. Its key sorts first; other objects are skipped, as
    bucket browsers leave one that is named like the folder."""
    after = ""
    for limit in (1, None):  # mostly one listed key is enough
        for info in store.list(SERVE_PREFIX, start_after=after, limit=limit):
            if is_version_name(info.key.removeprefix(SERVE_PREFIX)):
                return info.key
            after = info.key
        if not after:
            return None
    return None


class GroupLog:
    """Reads and writes snapshots as one server. Blocking; not thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        owner_name: str,
        clock: Clock,
        *,
        is_gone: Callable[[str], bool] = lambda owner_name: False,
        generation_of: GenerationOf = lambda topic, queue_id: 0,
        lease: str = "",
        has_lapsed: Callable[[str], bool] = lambda lease: False,
    ) -> None:
        """``owner_name``: this server, for messages. ``is_gone``: whether the server of a name has certainly ended;
        ``generation_of``: the served generation of a queue. ``lease``: the lease of the node of `tiered mount` that
        keeps the groups, empty for a server alone; ``has_lapsed``: whether such a lease, which a snapshot names, has
        ended."""
        self._lease, self._has_lapsed = lease, has_lapsed
        self._store = store
        self._generation_of = generation_of
        self._is_gone = is_gone
        self._owner = secrets.token_hex(8)
        self._owner_name = owner_name
        self._clock = clock
        self._last = GroupSnapshot()
        self._first_version = 0
        """The first version of this owner."""
        self._seen: tuple[int, int] = -1, 0
        """The version at the last claim, and when it was first seen by our clock."""
        self.locks: tuple[HeldLock, ...] | None = None
        """The locks on which clients relied when the groups were claimed; None: the owner before did not say."""

    @property
    def version(self) -> int:
        """The last version read or written."""
        return self._last.version

    @property
    def offsets(self) -> Offsets:
        """The offsets of the last version read or written."""
        return self._last.offsets

    def read(self) -> Offsets:
        """The newest offsets, of any owner."""
        self._last = load_snapshot(self._store)
        return self._last.offsets

    def number(self, topic: str, queue_id: int) -> int:
        """The queue's number in offsets, for the served generation."""
        return queue_number(
            queue_id, 0 if topic.startswith(_OWN_TOPICS) else self._generation_of(topic, queue_id)
        )

    def claim(self, lease_ms: int, *, take_over: bool = False) -> None:
        """Become the server that owns the consumer groups, by writing the next snapshot. Raises FencedError while
        another owner's lease lasts: it was renewed within ``lease_ms``, or is that of a node and has not ended.
        ``take_over``: claim the groups all the same."""
        newest = self._last = load_snapshot(self._store)
        now_ms = self._clock.wall_ms()
        if self._seen[0] != newest.version:
            self._seen = newest.version, now_ms
        # The owner's clock may be ahead: without a new version for that long it has ended.
        age_ms = max(now_ms - newest.renewed_ms, now_ms - self._seen[1])
        # Our own id: the reply to an earlier claim was lost.
        has_ended = newest.released or newest.owner in ("", self._owner) or self._is_gone(newest.owner_name)
        if not has_ended and not take_over and not self._is_expired(newest, age_ms >= lease_ms):
            raise FencedError(
                f"the consumer groups of this archive are served by {newest.owner_name}, which wrote their offsets"
                f" {age_ms // 1000} s ago",
                hint="reset offsets through that server (tiered reset-offset --serve), stop it, or start tiered"
                " serve with --take-over-groups",
            )
        if newest.owner != self._owner:
            self.locks = newest.locks
        self._first_version = newest.version + (0 if has_ended else 1)
        self.write(newest.offsets)
        # If this process slept, a successor may have written this version and removed it. Ours is not removed then: an
        # earlier owner that wakes up must find its next version taken, and stop.
        if newest_key(self._store) not in (None, snapshot_key(self._last.version)):
            raise FencedError("another server has taken over the consumer groups of this archive")
        oldest = max(newest.first_version, newest.version - VERSIONS_KEPT)
        # Unless the earlier owner has ended, its last version stays too: it writes it again if the reply was lost.
        self._remove(range(oldest + 1, newest.version + has_ended))

    def write(self, offsets: Mapping[tuple[str, str], Mapping[int, int]], *, released: bool = False) -> None:
        """Write ``offsets`` as the next snapshot; with the queue locks if it releases the groups for other servers.
        Raises FencedError if another server wrote a snapshot of this version. After other errors ours may or may not
        exist: the next write finds that out."""
        version = self._last.version + 1
        copied = {key: dict(queues) for key, queues in offsets.items()}
        snapshot = GroupSnapshot(
            version,
            self._owner,
            self._owner_name,
            self._clock.wall_ms(),
            released,
            copied,
            self._first_version,
            self._lease,
            self.locks if released else None,
        )
        try:
            self._store.put_if_absent(snapshot_key(version), [encode_snapshot(snapshot)])
        except AlreadyExistsError:
            winner = self._stored(version)
            if winner.owner != self._owner:
                raise FencedError(
                    f"the server {winner.owner_name} has taken over the consumer groups of this archive"
                ) from None
            # Our own, whose reply was lost. It is older than ``offsets``: write again.
            self._last = winner
            return self.write(offsets, released=released)
        self._last = snapshot
        if version - VERSIONS_KEPT > self._first_version:
            self._remove([version - VERSIONS_KEPT])
        return None

    def _stored(self, version: int) -> GroupSnapshot:
        """The snapshot that another write put there. Raises FencedError if a successor has removed it since."""
        key = snapshot_key(version)
        try:
            data = self._store.get(key, stored_bytes_max())
        except NotFoundError:
            raise FencedError("another server has taken over the consumer groups of this archive") from None
        return decode_snapshot(data, source=f"{self._store.url}/{key}")

    def _is_expired(self, found: GroupSnapshot, is_old: bool) -> bool:
        if not found.lease:
            return is_old
        # One of our own: the reply to a claim by an earlier object was lost.
        return found.lease == self._lease or self._has_lapsed(found.lease)

    def _remove(self, versions: Sequence[int]) -> None:
        if versions:
            self._store.delete([snapshot_key(version) for version in versions])
