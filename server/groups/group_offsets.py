"""Group offsets on the event loop: answered from memory, durable in batches before they are acknowledged.

All commits that come while a snapshot is being written go into the next one. Once another server owns the groups,
commits are refused and reading goes on.

Owns the table in memory, its bound and the batching. Snapshots are group_state.py's, requests offset_handlers.py's.
"""

from __future__ import annotations

import asyncio
import logging

from server.groups.group_state import GroupLog, Offsets, is_generation_of
from server.wire.request import BadRequestError
from tiered.errors import AccessDeniedError, FencedError, TieredError

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 0.2
RETRY_S = 1.0
CLOSE_S = 10.0
BYTES_MAX = 64 * 1024 * 1024
KEY_BYTES, QUEUE_BYTES, CHAR_BYTES = 500, 100, 4
"""A group's entry of a topic, with the dictionaries; a queue of it; a character of text at most."""
LOOK_AGAIN_S = 5.0
"""How often a server that does not own the groups looks whether it may."""


class GroupOffsets:
    """Offsets of all groups. While another server owns them they are shown and commits are refused."""

    def __init__(
        self, log: GroupLog, *, lease_ms: int, take_over: bool = False, bytes_max: int = BYTES_MAX
    ) -> None:
        """``bytes_max``: of all offsets in memory, about. Clients name groups as they like; above it no new one is
        taken, known ones go on."""
        self._log = log
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._lease_ms = lease_ms
        self._take_over = take_over
        self._offsets: Offsets = {}
        self._changed = asyncio.Event()
        self._flushed: asyncio.Future[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        """A version on its way; it goes on when who waits for it is cancelled."""
        self.is_owner = False

    async def claim(self) -> bool:
        """Own the groups if that is possible now; whether they are owned. Raises what the store raises."""
        try:
            await asyncio.to_thread(self._log.claim, self._lease_ms, take_over=self._take_over)
        except FencedError as error:
            logger.warning("%s: consumers can read, their offsets are not kept", error)
        except AccessDeniedError as error:
            logger.warning("group offsets cannot be written: %s", error)
        else:
            self.is_owner, self._take_over = True, False
        self._offsets = {key: dict(queues) for key, queues in self._log.offsets.items()}
        self._held_bytes = sum(
            _key_bytes(*key) + QUEUE_BYTES * len(queues) for key, queues in self._offsets.items()
        )
        return self.is_owner

    def find(self, group: str, topic: str, queue_id: int) -> int | None:
        """The group's offset as last committed here, in the life of the queue that is served; a group that consumed a
        former one begins the new one at its first message."""
        queues = self._offsets.get((group, topic))
        if queues is None:
            return None
        number = self._log.number(topic, queue_id)
        found = queues.get(number)
        if (
            found is None
            and number != queue_id
            and any(is_generation_of(known, queue_id) for known in queues)
        ):
            return 0
        return found

    def is_new_generation(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether the group consumed a former life of the queue, and has no offset of the one that is served."""
        queues = self._offsets.get((group, topic))
        if queues is None:
            return False
        number = self._log.number(topic, queue_id)
        return (
            number not in queues and number != queue_id and any(is_generation_of(n, queue_id) for n in queues)
        )

    def is_earlier_generation(self, group: str, topic: str, queue_id: int, offset: int, end: int) -> bool:
        """Whether ``offset``, which a member commits, is of a life of the queue that is over: beyond the ``end`` of the
        new one, of which the group has none yet. Members commit what they have every few seconds."""
        return offset > end and self.is_new_generation(group, topic, queue_id)

    def durable(self, group: str, topic: str, queue_id: int) -> int:
        """The group's offset as last written, 0 without any: what may be relied on after any end of this server."""
        return self._log.offsets.get((group, topic), {}).get(self._log.number(topic, queue_id), 0)

    def topics_of(self, group: str) -> list[str]:
        """Topics of which the group committed offsets."""
        return sorted({topic for name, topic in self._offsets if name == group})

    def groups_of(self, topic: str) -> list[str]:
        """Groups that committed offsets of ``topic``."""
        return sorted({group for group, name in self._offsets if name == topic})

    def groups(self) -> list[str]:
        """All of them."""
        return sorted({group for group, _ in self._offsets})

    def note(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Take an offset; durable soon. Nothing happens while the groups are another's, or for a new queue of a group
        when there is no room: a client learns that when it commits."""
        number = self._log.number(topic, queue_id)
        if self.is_owner and self._has_room(group, topic, number):
            self._take(group, topic, number, offset)

    def _take(self, group: str, topic: str, number: int, offset: int) -> None:
        queues = self._offsets.get((group, topic))
        if queues is None:
            queues = self._offsets[group, topic] = {}
            self._held_bytes += _key_bytes(group, topic)
        before = queues.get(number)
        if before != offset:
            self._held_bytes += QUEUE_BYTES if before is None else 0
            queues[number] = offset
            self._changed.set()

    def has_room(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether an offset of this queue is kept, or could be."""
        return self._has_room(group, topic, self._log.number(topic, queue_id))

    def _has_room(self, group: str, topic: str, number: int) -> bool:
        queues = self._offsets.get((group, topic))
        if queues is not None and number in queues:
            return True
        more_bytes = QUEUE_BYTES + (_key_bytes(group, topic) if queues is None else 0)
        return self._held_bytes + more_bytes <= self._bytes_max

    async def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Take an offset and return once it is durable. Raises FencedError when the groups are another's,
        BadRequestError when there is no room for a group or queue that has none yet."""
        if not self.is_owner:
            raise FencedError("consumer groups of this archive are served by another server")
        number = self._log.number(topic, queue_id)
        if (
            self._offsets.get((group, topic), {}).get(number) == offset
            and self._log.offsets.get((group, topic), {}).get(number) == offset
            and self._flushed is None
            and not self._changed.is_set()
        ):
            return
        if not self._has_room(group, topic, number):
            raise BadRequestError(
                f"offsets of all groups have {self._held_bytes} bytes, no new ones are kept (serve.offsets_bytes_max)"
            )
        self._take(group, topic, number, offset)
        self._changed.set()
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._flushed)

    async def run(self) -> None:
        """Write what changed, again and again, renew the lease, and try to own what is not owned; until cancelled."""
        while True:
            try:
                wait_s = self._lease_ms / 3000
                async with asyncio.timeout(wait_s if self.is_owner else min(wait_s, LOOK_AGAIN_S)):
                    await self._changed.wait()
                await asyncio.sleep(FLUSH_EVERY_S)
            except TimeoutError:
                pass  # nothing changed: the snapshot renews the lease
            try:
                if self.is_owner or await self.claim():
                    await self._flush()
                else:
                    self._changed.clear()
            except TieredError as error:
                logger.warning("group offsets: %s", error)

    async def _flush(self, *, released: bool = False) -> None:
        waiters, self._flushed = self._flushed, None
        self._changed.clear()
        copied = {key: dict(queues) for key, queues in self._offsets.items()}
        while True:
            try:
                await self._written(copied, released=released)
                break
            except FencedError as error:
                logger.error("%s: commits are refused from now on, reading goes on", error)
                self.is_owner = False
                # Also who came while this was written: their offsets are in no version, and will be in none.
                later, self._flushed = self._flushed, None
                for refused in (waiters, later):
                    if refused is not None:
                        refused.set_exception(error)
                return
            except TieredError as error:
                logger.warning("group offsets not written yet: %s", error)
                await asyncio.sleep(RETRY_S)
        if waiters is not None:
            waiters.set_result(None)

    async def _written(self, offsets: Offsets, *, released: bool) -> None:
        write = asyncio.to_thread(self._log.write, offsets, released=released)
        self._writing = asyncio.create_task(write)
        await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Write what is left and give the groups up; what is being written comes first, or it would be the newest.
        Without the store for CLOSE_S they are left to their lease."""
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._writing is not None:
                    await asyncio.wait({self._writing})
                if self.is_owner:
                    await self._flush(released=True)
        except TimeoutError:
            logger.error("group offsets that were not acknowledged are not written: the store is away")


def _key_bytes(group: str, topic: str) -> int:
    return KEY_BYTES + CHAR_BYTES * (len(group) + len(topic))
