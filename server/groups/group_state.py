"""Offsets of consumer groups that read the archive, durable before they are acknowledged.

Numbered snapshots under ``state/serve/``, newest first in a listing, each created only if absent: two servers cannot
both write version n, so the loser knows that it no longer owns the groups. The version that made a server the owner is
not removed while the server before may wake up, however long after, as it is the next one that would write; it goes as
others do where that one gave the groups up, or certainly does not run any more. Who becomes the owner looks whether it
wrote the newest one: it may have waited so long that its version was there, and was removed. A snapshot is small
(groups times queues) and written at most once a flush interval, by one task, for all commits that came meanwhile.

Owns the snapshots and who may write them. Does not own the table in memory (group_offsets.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tiered.errors import AlreadyExistsError, CorruptionError, FencedError, NotFoundError
from tiered.formats.container import decode_container, encode_container
from tiered.formats.keys import SERVE_PREFIX
from tiered.object_store.interface import ObjectStore

KIND: Final = b"RMQTSERV"
VERSIONS_KEPT: Final = 8
LIFE_BITS: Final = 32
_OWN_TOPICS: Final = ("%RETRY%", "%DLQ%")
"""Prefixes of topics that go on here, whatever life of them was archived."""
_VERSION_MAX: Final = 10**20 - 1

Offsets = dict[tuple[str, str], dict[int, int]]
"""(group, topic) -> queue number (``queue_number``) -> next queue offset to consume."""
GenerationOf = Callable[[str, int], int]
"""Topic and queue id -> which life of the queue is served."""


def queue_number(queue_id: int, generation: int) -> int:
    """What names a queue in offsets. A recreated topic begins at 0 again, and its groups with it: offsets of its former
    lives are not theirs."""
    return queue_id + (generation << LIFE_BITS)


def is_generation_of(number: int, queue_id: int) -> bool:
    """Whether ``number`` names some life of the queue."""
    return number & ((1 << LIFE_BITS) - 1) == queue_id


@dataclass(frozen=True)
class GroupSnapshot:
    """One version. ``owner`` is a random id of the process that wrote it; ``owner_name`` is for people."""

    version: int = 0
    owner: str = ""
    owner_name: str = ""
    renewed_ms: int = 0
    released: bool = False
    offsets: Offsets = field(default_factory=dict)
    first_version: int = 0
    """None up to it is its owner's to remove: the one that made it the owner, or the last one before."""
    has_lives: bool = True
    """False in what was written before offsets were kept by life: then they are of the life that is served."""


def snapshot_key(version: int) -> str:
    """Key of a version; newer ones sort first."""
    return f"{SERVE_PREFIX}{_VERSION_MAX - version:020d}"


def encode_snapshot(snapshot: GroupSnapshot) -> bytes:
    """The object's bytes."""
    rows = [
        [group, topic, sorted(queues.items())] for (group, topic), queues in sorted(snapshot.offsets.items())
    ]
    header = {
        "version": snapshot.version, "owner": snapshot.owner, "owner_name": snapshot.owner_name,
        "renewed_ms": snapshot.renewed_ms, "released": snapshot.released, "offsets": rows,
        "first_version": snapshot.first_version, "has_lives": snapshot.has_lives,
    }  # fmt: skip
    return encode_container(KIND, header, {})


def decode_snapshot(data: bytes, *, source: str) -> GroupSnapshot:
    """Raises CorruptionError or UnsupportedFormatError naming ``source``."""
    header = decode_container(data, KIND, source=source).header
    try:
        offsets = {
            (str(group), str(topic)): {int(queue): int(offset) for queue, offset in queues}
            for group, topic, queues in header["offsets"]
        }
        return GroupSnapshot(
            int(header["version"]), str(header["owner"]), str(header["owner_name"]), int(header["renewed_ms"]),
            bool(header["released"]), offsets, int(header.get("first_version", header["version"])),
            bool(header.get("has_lives", False)),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{source}: snapshot of consumer groups does not parse: {error!r}") from error


def load_snapshot(store: ObjectStore) -> GroupSnapshot:
    """The newest version, or version 0 when nobody has served this archive yet."""
    key = newest_key(store)
    if key is None:
        return GroupSnapshot()
    try:
        return decode_snapshot(store.get(key), source=f"{store.url}/{key}")
    except NotFoundError:
        return load_snapshot(store)  # a newer one came and this was removed meanwhile


def newest_key(store: ObjectStore) -> str | None:
    """Of the newest version. Objects that are none are passed over, as in the catalog: browsers of buckets leave one
    that is called like the folder, in front of all others."""
    after = ""
    for limit in (1, None):
        for info in store.list(SERVE_PREFIX, start_after=after, limit=limit):
            if info.key.removeprefix(SERVE_PREFIX).isdecimal():
                return info.key
            after = info.key
        if not after:
            return None
    return None


class GroupLog:
    """The one writer of an archive's groups. Blocking; not thread-safe: one task uses it."""

    def __init__(
        self,
        store: ObjectStore,
        owner_name: str,
        clock_ms: Callable[[], int],
        *,
        is_gone: Callable[[str], bool] = lambda owner_name: False,
        generation_of: GenerationOf = lambda topic, queue_id: 0,
    ) -> None:
        """``is_gone``: whether the owner of this name certainly does not run any more."""
        self._store = store
        self._generation_of = generation_of
        self._is_gone = is_gone
        self._owner = secrets.token_hex(8)
        self._owner_name = owner_name
        self._clock_ms = clock_ms
        self._last = GroupSnapshot()
        self._first_version = 0
        """See GroupSnapshot."""
        self._seen: tuple[int, int] = -1, 0
        """The version that was there when this one last asked to own the groups, and since when by its own clock."""

    @property
    def offsets(self) -> Offsets:
        """As of the last version read or written."""
        return self._last.offsets

    def read(self) -> Offsets:
        """The newest offsets, whoever writes them."""
        self._last = self._with_lives(load_snapshot(self._store))
        return self._last.offsets

    def number(self, topic: str, queue_id: int) -> int:
        """What names the queue in offsets, in the life that is served."""
        return queue_number(
            queue_id, 0 if topic.startswith(_OWN_TOPICS) else self._generation_of(topic, queue_id)
        )

    def _with_lives(self, found: GroupSnapshot) -> GroupSnapshot:
        if found.has_lives:
            return found
        offsets = {
            (group, topic): {self.number(topic, queue_id): offset for queue_id, offset in queues.items()}
            for (group, topic), queues in found.offsets.items()
        }
        return replace(found, offsets=offsets, has_lives=True)

    def claim(self, lease_ms: int, *, take_over: bool = False) -> None:
        """Become the owner. Raises FencedError while another one, not released, renewed within ``lease_ms``."""
        found = self._last = self._with_lives(load_snapshot(self._store))
        now_ms = self._clock_ms()
        if self._seen[0] != found.version:
            self._seen = found.version, now_ms
        # An owner's clock may be ahead: one that was not heard of for so long is gone, whatever it wrote.
        age_ms = max(now_ms - found.renewed_ms, now_ms - self._seen[1])
        # Our own: an answer to an earlier claim was lost.
        has_ended = found.released or found.owner in ("", self._owner) or self._is_gone(found.owner_name)
        if not has_ended and age_ms < lease_ms and not take_over:
            raise FencedError(
                f"consumer groups of this archive are served by {found.owner_name}, seen {age_ms // 1000} s ago",
                hint="go through it (tiered reset-offset --serve), stop it, or give tiered serve --take-over-groups",
            )
        self._first_version = found.version + (0 if has_ended else 1)
        self.write(found.offsets)
        self._check_newest()
        oldest = max(found.first_version, found.version - VERSIONS_KEPT)
        self._remove(range(oldest + 1, found.version + 1))

    def write(self, offsets: Mapping[tuple[str, str], Mapping[int, int]], *, released: bool = False) -> None:
        """Make ``offsets`` durable as the next version; raises FencedError once somebody else wrote it.

        Other errors leave open whether it was written: the next write finds out.
        """
        version = self._last.version + 1
        copied = {key: dict(queues) for key, queues in offsets.items()}
        snapshot = GroupSnapshot(
            version,
            self._owner,
            self._owner_name,
            self._clock_ms(),
            released,
            copied,
            self._first_version,
        )
        try:
            self._store.put_if_absent(snapshot_key(version), [encode_snapshot(snapshot)])
        except AlreadyExistsError:
            key = snapshot_key(version)
            winner = decode_snapshot(self._store.get(key), source=f"{self._store.url}/{key}")
            if winner.owner != self._owner:
                raise FencedError(f"consumer groups are served by {winner.owner_name} now") from None
            # Our own, whose answer was lost: what it holds is older than ``offsets``, so write once more.
            self._last = winner
            return self.write(offsets, released=released)
        self._last = snapshot
        if version - VERSIONS_KEPT > self._first_version:
            self._remove([version - VERSIONS_KEPT])
        return None

    def _check_newest(self) -> None:
        key = snapshot_key(self._last.version)
        if newest_key(self._store) not in (None, key):
            self._remove([self._last.version])
            raise FencedError("consumer groups of this archive are served by another server by now")

    def _remove(self, versions: Sequence[int]) -> None:
        if versions:
            self._store.delete([snapshot_key(version) for version in versions])

    def document(self) -> dict[str, Any]:
        """For status."""
        return {"version": self._last.version, "owner": self._owner_name}
