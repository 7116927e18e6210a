"""Group offsets on the event loop: read from memory, written in batches before commits are acknowledged.

Commits during a write go into the next snapshot. After another server has taken over the groups, commits are refused
and reads continue. Owns the table in memory, its limit and the batching; group_state.py owns snapshots.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping

from rocketmq_tiered.server.groups.group_state import GroupLog, HeldLock, Offsets, is_generation_of
from rocketmq_tiered.server.wire.request import BadRequestError
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import AccessDeniedError, FencedError, TieredError

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.2
RETRY_S = 1.0
CLOSE_S = 10.0
BYTES_MAX = 64 * 1024 * 1024
KEY_BYTES, QUEUE_BYTES, CHAR_BYTES = 500, 100, 4
"""Memory estimate: a group's entry of a topic, a queue in it, a character."""
GROUP_PART, ACCOUNT_PART = 4, 2
"""The parts of the memory, a fourth and a half, that one group and one account may fill."""
CLAIM_RETRY_S = 5.0
"""How often a server that does not own the groups tries to."""


class GroupOffsets:
    """Offsets of all groups. While another server owns them, commits are refused."""

    def __init__(
        self,
        log: GroupLog,
        *,
        lease_ms: int,
        take_over: bool = False,
        bytes_max: int = BYTES_MAX,
        clock: Clock = MACHINE_CLOCK,
        node_holds: Callable[[], bool] | None = None,
    ) -> None:
        """``log``: the snapshots of offsets in the object store; ``lease_ms``: how long this server owns the groups
        after each snapshot; ``take_over``: claim them even from a server that is alive; ``bytes_max``: of all offsets
        in memory, above which new groups and queues are refused, as clients choose names freely. ``node_holds``:
        whether the lease of this node, which includes the groups, has not ended; None: the groups have a lease of their
        own, which each snapshot renews, and lost groups are claimed again."""
        self._node_holds = node_holds
        self._log, self._clock = log, clock
        self._renewed_s = -math.inf
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._group_bytes: Counter[str] = Counter()
        self._account_bytes: Counter[str] = Counter()
        """Added since the claim: snapshots name no accounts."""
        self._lease_ms = lease_ms
        self._take_over = take_over
        self._offsets: Offsets = {}
        self._changed = asyncio.Event()
        self._flushed: asyncio.Future[None] | None = None
        """What commits wait for that are in the next snapshot; None: no commit waits."""
        self._writing: asyncio.Task[None] | None = None
        """A snapshot being written; shielded from cancellation."""
        self.is_owner = False

    @property
    def holds_lease(self) -> bool:
        """Whether no other server can own the groups: this one does, and renewed its lease within the lease time. While
        the store does not answer, an owner does not notice that it was replaced."""
        if self._node_holds is not None:
            return self.is_owner and self._node_holds()
        return self.is_owner and self._clock.monotonic_s() - self._renewed_s < self._lease_ms / 1000

    @property
    def may_pop(self) -> bool:
        """Whether messages may be popped for the groups."""
        return self.is_owner if self._node_holds is None else self.holds_lease

    async def claim(self) -> bool:
        """Try to become the owner of the consumer groups, and read their offsets. Returns whether this server owns
        them; if it owned them before, a refusal does not change that. Raises the errors of the object store, but for a
        refusal to write: then offsets can be read."""
        began_s = self._clock.monotonic_s()
        try:
            await asyncio.to_thread(self._log.claim, self._lease_ms, take_over=self._take_over)
        except FencedError as error:
            logger.warning("consumers can read here, but their commits of offsets are refused: %s", error)
        except AccessDeniedError as error:
            logger.warning("the object store does not let this server write group offsets: %s", error)
        else:
            self.is_owner, self._take_over, self._renewed_s = True, False, began_s
        self._offsets = {key: dict(queues) for key, queues in self._log.offsets.items()}
        # What is read does not say which accounts committed it: bytes count for accounts from now on.
        self._group_bytes, self._account_bytes = Counter(), Counter()
        for key, queues in self._offsets.items():
            self._group_bytes[key[0]] += _key_bytes(*key) + QUEUE_BYTES * len(queues)
        self._held_bytes = self._group_bytes.total()
        return self.is_owner

    def find(self, group: str, topic: str, queue_id: int) -> int | None:
        """The group's last commit here, for the served generation of the queue. A group with an offset of an earlier
        generation only starts at 0."""
        found = self._offsets.get((group, topic), {}).get(self._log.number(topic, queue_id))
        return 0 if found is None and self.is_new_generation(group, topic, queue_id) else found

    def is_new_generation(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether the group has an offset of an earlier generation of the queue and none of the served one."""
        queues, number = self._offsets.get((group, topic), {}), self._log.number(topic, queue_id)
        is_later = number not in queues and number != queue_id
        return is_later and any(is_generation_of(known, queue_id) for known in queues)

    def is_earlier_generation(self, group: str, topic: str, queue_id: int, offset: int, end: int) -> bool:
        """Whether a committed ``offset`` belongs to an earlier generation: past the ``end`` of the served one, of which
        the group has no offset yet. Members keep committing their old offset every few seconds."""
        return offset > end and self.is_new_generation(group, topic, queue_id)

    def durable(self, group: str, topic: str, queue_id: int) -> int:
        """The group's offset as last written, 0 without one: it survives a crash."""
        return self._log.offsets.get((group, topic), {}).get(self._log.number(topic, queue_id), 0)

    def topics_of(self, group: str) -> list[str]:
        """Topics with an offset of ``group``."""
        return sorted({topic for name, topic in self._offsets if name == group})

    def table(self) -> Mapping[tuple[str, str], Mapping[int, int]]:
        """(group, topic) -> queue number -> offset."""
        return self._offsets

    def groups(self) -> set[str]:
        """Groups with offsets."""
        return {name for name, _ in self._offsets}

    @property
    def claimed_locks(self) -> tuple[HeldLock, ...] | None:
        """The locks that clients trusted when the groups were claimed; None: the owner before did not say."""
        return self._log.locks

    def groups_of(self, topic: str) -> list[str]:
        """Groups with an offset of ``topic``."""
        return sorted({group for group, name in self._offsets if name == topic})

    def note(self, group: str, topic: str, queue_id: int, offset: int, account: str = "") -> None:
        """Record an offset of ``account``, to be written soon. Ignored while another server owns the groups, or at
        a memory limit: an explicit commit reports that."""
        number = self._log.number(topic, queue_id)
        if self.is_owner and self._has_room(group, topic, number, account):
            self._take(group, topic, number, offset, account)

    def _take(self, group: str, topic: str, number: int, offset: int, account: str) -> None:
        """Take an offset that ``account`` commits into memory, to be written with the next snapshot. ``number``: the
        queue's id and generation as one number."""
        more_bytes = self._more_bytes(group, topic, number)
        self._held_bytes += more_bytes
        self._group_bytes[group] += more_bytes
        self._account_bytes[account] += more_bytes
        queues = self._offsets.setdefault((group, topic), {})
        if queues.get(number) != offset:
            queues[number] = offset
            self._changed.set()

    def has_room(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether an offset of this queue fits."""
        return self._has_room(group, topic, self._log.number(topic, queue_id), "")

    def _more_bytes(self, group: str, topic: str, number: int) -> int:
        queues = self._offsets.get((group, topic))
        if queues is None:
            return QUEUE_BYTES + _key_bytes(group, topic)
        return 0 if number in queues else QUEUE_BYTES

    def _has_room(self, group: str, topic: str, number: int, account: str) -> bool:
        """Return whether an offset fits into the memory for all, for its group, and for ``account`` (empty: of none).
        ``number``: the queue's id and generation as one number."""
        more_bytes, limit_bytes = self._more_bytes(group, topic, number), self._bytes_max
        return not more_bytes or (
            self._held_bytes + more_bytes <= limit_bytes
            and self._group_bytes[group] + more_bytes <= limit_bytes // GROUP_PART
            and (not account or self._account_bytes[account] + more_bytes <= limit_bytes // ACCOUNT_PART)
        )

    async def commit(self, group: str, topic: str, queue_id: int, offset: int, account: str = "") -> None:
        """Take an offset that ``account`` commits, and return once it is durable. Raises FencedError if another server
        owns the groups, and BadRequestError for a new group or queue at a memory limit: of all, of its group, of
        ``account``."""
        if not self.is_owner:
            raise FencedError(
                "the offset is not committed, as another server owns the consumer groups of this archive"
            )
        number = self._log.number(topic, queue_id)
        # The same offset is written already, and no later commit is on its way.
        if (
            self._offsets.get((group, topic), {}).get(number) == offset
            and self._log.offsets.get((group, topic), {}).get(number) == offset
            and self._flushed is None
            and not self._changed.is_set()
        ):
            return
        if not self._has_room(group, topic, number, account):
            raise BadRequestError(
                f"the offset is not committed: group offsets take {self._held_bytes} bytes, those of this group"
                f" {self._group_bytes[group]}, and there is no memory for more: raise serve.memory_bytes"
            )
        self._take(group, topic, number, offset, account)
        self._changed.set()
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._flushed)

    async def run(self) -> None:
        """Write changed offsets, renew the lease in time, and try to claim the groups while another server owns them;
        until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._renew_after_s()):
                    await self._changed.wait()
                await asyncio.sleep(FLUSH_EVERY_S)  # more commits join the same snapshot
            except TimeoutError:
                pass  # nothing changed: the snapshot renews the lease
            try:
                if self.is_owner or (self._node_holds is None and await self.claim()):
                    await self._flush()
                else:  # the owner has what clients commit from now on
                    self._changed.clear()
            except TieredError as error:
                logger.warning(
                    "this server cannot claim the consumer groups of its archive now, and tries again: %s",
                    error,
                )

    def _renew_after_s(self) -> float | None:
        if self._node_holds is not None:
            return None
        wait_s = self._lease_ms / 3000
        return wait_s if self.is_owner else min(wait_s, CLAIM_RETRY_S)

    async def _flush(self, *, released: bool = False) -> None:
        """Write all offsets in a snapshot, repeated until the object store takes it, and then answer the commits that
        wait for it. If another server has claimed the groups, these fail, and later ones are refused. ``released``:
        this server owns the groups no longer after that."""
        waiters, self._flushed = self._flushed, None
        self._changed.clear()
        copied = {key: dict(queues) for key, queues in self._offsets.items()}
        while True:
            try:
                await self._written(copied, released=released)
                break
            except FencedError as error:
                logger.error(
                    "this server refuses commits of offsets until it owns the consumer groups again: %s",
                    error,
                )
                self.is_owner = False
                # Commits during this write are in no snapshot either.
                later, self._flushed = self._flushed, None
                for refused in (waiters, later):
                    if refused is not None:
                        refused.set_exception(error)
                return
            except TieredError as error:
                logger.warning(
                    "group offsets could not be written, and their commits wait for the next attempt: %s",
                    error,
                )
                await asyncio.sleep(RETRY_S)
        if waiters is not None:
            waiters.set_result(None)

    async def _written(self, offsets: Offsets, *, released: bool) -> None:
        began_s = self._clock.monotonic_s()
        write = asyncio.to_thread(self._log.write, offsets, released=released)
        self._writing = asyncio.create_task(write)
        await asyncio.shield(self._writing)
        self._renewed_s = began_s

    async def close(self, locks: tuple[HeldLock, ...] | None = None) -> None:
        """Finish the write in progress, write pending offsets and release the groups with their queue locks (``locks``;
        None: unknown), so that another server can own them at once. If the object store does not answer for CLOSE_S,
        the lease runs out instead."""
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._writing is not None:
                    await asyncio.wait({self._writing})
                if self.is_owner:
                    self._log.locks = locks
                    await self._flush(released=True)
                    self.is_owner = False
        except TimeoutError:
            logger.error(
                "the last group offsets could not be written, as the object store does not answer: their commits"
                " were not acknowledged, and clients repeat them"
            )


def _key_bytes(group: str, topic: str) -> int:
    return KEY_BYTES + CHAR_BYTES * (len(group) + len(topic))
