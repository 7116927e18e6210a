"""A broker as its disk shows it: real store bytes, a log that loses its end, files that it deletes, disks put back."""

import json
import os
import random
import shutil
import struct
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.fetcher.broker_store_writer import FILE_BYTES, WrittenStore
from tiered.formats.record import SYS_INNER_BATCH
from tiered.model.queue import SCHEDULE_TOPIC
from tiered.model.timer import DELIVER_MS, TOPIC, TimerPlace, cancel_properties

PLAIN, EXPIRING, RETRY, BATCHES, RECREATED, KEYED, TIMERS = (
    "orders",
    "mails",
    "%RETRY%group",
    "batches",
    "news",
    "prices",
    "TIERED_TIMERS",
)
LIGHT = "%LMQ%light"
REPEATING = (PLAIN, EXPIRING, KEYED)
"""Topics whose offsets the broker may use again."""
TOPICS = (PLAIN, EXPIRING, RETRY, BATCHES, RECREATED, KEYED, TIMERS)
QUEUES = 2
Queue = tuple[str, int]


@dataclass(frozen=True)
class Stored:
    """A record of the log, and the places of its entries."""

    phys: int
    record: bytes
    places: tuple[tuple[Queue, int, int], ...]
    """Queue, offset, and the offset after it."""
    stored_ms: int


@dataclass
class Timer:
    """A timer, or what cancels the timers of its name (``cancels``), perhaps only the one at ``at``."""

    name: tuple[str, str, int]
    """Topic, key, time of delivery."""
    phys: int
    at: TimerPlace | None
    cancels: bool = False
    record: bytes = field(default=b"", repr=False)
    was_lost: bool = False
    """The log was without it for some time."""


@dataclass
class Disk:
    """What a disk has: ``log`` in order, and the next offset of each queue."""

    phys: int = 0
    first_phys: int = 0
    log: list[Stored] = None  # type: ignore[assignment]
    ends: dict[Queue, int] = None  # type: ignore[assignment]
    begins: dict[Queue, int] = None  # type: ignore[assignment]
    """Physical offset from which on the topic lives."""


class BrokerModel:
    """``ever``: all records that a queue ever had at an offset. ``lost``: physical offsets of records that were deleted
    before they were archived."""

    def __init__(self, path: Path, source: random.Random, begin_ms: int) -> None:
        self._random, self._begin_ms = source, begin_ms
        self.disk = Disk(log=[], ends={}, begins={})
        self._saved: list[tuple[int, Path, Disk]] = []
        (path / "config").mkdir(parents=True)
        self.store = WrittenStore(path)
        self.lists_all = True
        self.write_topics()
        self.ever: dict[tuple[str, int, int], dict[bytes, int]] = {}
        self.lost: set[int] = set()
        self.timers: list[Timer] = []
        self.repeating: set[Queue] = set()
        """Queues of which an offset was used again."""
        self.starts = 0
        """A broker that starts may have cut its log."""
        self._seen: dict[str, tuple[int, int]] = {}
        self.watch()

    def write_topics(self) -> None:
        """The topic table, which a slave fills again and again: a topic may be absent for a while."""
        rows = {
            name: {"topicName": name, "readQueueNums": QUEUES, "writeQueueNums": QUEUES}
            | ({"attributes": {"queue.type": "BatchCQ"}} if name == BATCHES else {})
            for name in TOPICS
            if self.lists_all or name != BATCHES
        }
        (self.store.path / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": rows}))

    @property
    def records(self) -> dict[Queue, dict[int, Stored]]:
        """What the queues of living topics have, by offset."""
        found: dict[Queue, dict[int, Stored]] = {}
        for stored in self.disk.log:
            for queue, offset, _ in stored.places:
                if stored.phys >= self.disk.begins.get(queue, 0):
                    found.setdefault(queue, {})[offset] = stored
        return found

    # -- what happens -----------------------------------------------------------------------------------------

    def send(self, now_ms: int) -> None:
        """Some messages: plain, with tags, with keys, large, of several queues, batches, deletions of keys."""
        for _ in range(self._random.randint(1, 10)):
            if self._random.random() < 0.06:
                self._send_unseen(now_ms)
            self._send_one(now_ms, self._random.choice(TOPICS))

    def cancel(self, now_ms: int) -> None:
        """A message that cancels a timer, if there is one."""
        self._send_one(now_ms, TIMERS, cancels=1.0)

    def lose_queues(self) -> None:
        """A topic's files of consume queues are gone; the topic is not."""
        folder = self.store.path / "consumequeue" / RETRY
        if folder.exists() and not self._away.exists():
            folder.rename(self._away)

    def find_queues(self) -> None:
        """They are back."""
        if self._away.exists():
            self._away.rename(self.store.path / "consumequeue" / RETRY)

    @property
    def _away(self) -> Path:
        return self.store.path / "away"

    def use_offset_again(self, now_ms: int, since_ms: int) -> bool:
        """A queue loses its newest unit, of a record stored after ``since_ms``: the next message has its offset, and
        no queue has the record any more. Returns whether there was one, above the begin of the queue."""
        disk, queue = self.disk, (self._random.choice(REPEATING), self._random.randrange(QUEUES))
        offset = disk.ends.get(queue, 0) - 1
        for number, stored in enumerate(disk.log):
            place = queue, offset, offset + 1
            if place in stored.places and stored.stored_ms >= since_ms and offset > 0:
                others = tuple(one for one in stored.places if one != place)
                disk.log[number], disk.ends[queue] = replace(stored, places=others), offset
                self._send_one(now_ms, *queue)
                self.repeating.add(queue)
                return True
        return False

    def send_where_repeated(self, now_ms: int) -> None:
        """What queues have then decides which records are archived."""
        for queue in sorted(self.repeating):
            self._send_one(now_ms, *queue)

    def _send_one(
        self, now_ms: int, topic: str, queue_id: int | None = None, *, cancels: float = 0.2
    ) -> None:
        source, disk = self._random, self.disk
        queue = topic, source.randrange(QUEUES) if queue_id is None else queue_id
        if topic == RETRY:
            self.find_queues()
        body = source.randbytes(source.choice((0, 20, 300, 3_000)))
        is_keyed = queue[0] == KEYED or source.random() < 0.4
        count = source.randint(1, 4) if queue[0] == BATCHES else 1
        offset, more = disk.ends.get(queue, 0), {}
        places = [(queue, offset, offset + count)]
        if queue[0] == BATCHES:
            more["INNER_NUM"] = str(count)
        elif queue[0] == TIMERS:
            timer, more = self._timer(now_ms, TimerPlace(queue[1], offset), cancels)
        elif queue[0] in (PLAIN, EXPIRING) and source.random() < 0.3:
            light = disk.ends.get((LIGHT, 0), 0)
            more |= {"INNER_MULTI_DISPATCH": LIGHT, "INNER_MULTI_QUEUE_OFFSET": str(light)}
            places.append(((LIGHT, 0), light, light + 1))
        self.store.phys = disk.phys
        self.store.put(
            *queue,
            body,
            tags=source.choice(("", "A", "B")),
            keys=f"k{source.randrange(9)}" if is_keyed else "",
            later_ms=now_ms - self._begin_ms + self._hours_off(topic) * 3_600_000,
            more=more,
            offset=offset,
            with_unit=count == 1 and queue[0] != BATCHES,
            sys_flag=SYS_INNER_BATCH if queue[0] == BATCHES else source.choice((0, 8)) * (queue[0] == PLAIN),
        )
        record = self.store.records[queue][offset]
        disk.phys = self.store.phys
        stored = Stored(disk.phys - len(record), record, tuple(places), now_ms)
        if queue[0] == TIMERS:
            timer.phys, timer.record = stored.phys, stored.record
            self.timers.append(timer)
        if len(places) > 1:
            self.store.put_unit(LIGHT, 0, places[1][1], struct.pack(">qiq", stored.phys, len(record), 0))
        for place, at, end in places:
            disk.ends[place] = end
            self.ever.setdefault((*place, at), {})[record] = now_ms
        disk.log.append(stored)

    def _hours_off(self, topic: str) -> int:
        """By which the broker's clock is off, sometimes."""
        hours = self._random.choice((-3, 3, 24)) if self._random.random() < 0.02 else 0
        return {PLAIN: hours, KEYED: hours, EXPIRING: max(hours, 0)}.get(topic, 0)

    def _send_unseen(self, now_ms: int) -> None:
        """What no queue of the archive has: half of a transaction, or a message that waits for its delay."""
        self.store.phys = self.disk.phys
        is_half, body, later_ms = self._random.random() < 0.5, bytes(40), now_ms - self._begin_ms
        place = (PLAIN, 0, 0) if is_half else (SCHEDULE_TOPIC, 2, self.disk.ends.get((SCHEDULE_TOPIC, 2), 0))
        self.store.put(
            *place[:2], body, later_ms=later_ms, offset=place[2], with_unit=not is_half, sys_flag=4 * is_half
        )
        if not is_half:
            self.disk.ends[place[:2]] = place[2] + 1
        stored = Stored(self.disk.phys, self.store.records[place[:2]][place[2]], (), now_ms)
        self.disk.log.append(replace(stored, phys=self.store.phys - len(stored.record)))
        self.disk.phys = self.store.phys

    def _timer(self, now_ms: int, at: TimerPlace, cancels: float) -> tuple[Timer, dict[str, str]]:
        """A new one, or, with the probability ``cancels``, the cancellation of one, and its properties."""
        source, key = self._random, f"K{self._random.randrange(3)}"
        if source.random() < cancels and self.timers:
            old = source.choice(self.timers[-9:])
            place = old.at if source.random() < 0.5 else None
            topic, key, deliver_ms = old.name
            return Timer(old.name, 0, place, cancels=True), cancel_properties(topic, deliver_ms, key, place)
        deliver_ms = now_ms + source.choice((10_000, 30_000, source.randrange(150_000)))
        deliver_ms -= source.choice((0, deliver_ms % 10_000))
        name = source.choice((PLAIN, EXPIRING)), key, deliver_ms
        if self.timers and source.random() < 0.3 and self.timers[-1].name[2] > now_ms:
            name = self.timers[-1].name  # sent again, which makes two
        topic, key, deliver_ms = name
        return Timer(name, 0, at), {"UNIQ_KEY": key, TOPIC: topic, DELIVER_MS: str(deliver_ms)}

    def is_cancelled(self, timer: Timer, before_phys: int) -> bool:
        """By a message that the log has below ``before_phys``, and never lost."""
        return any(
            one.cancels
            and one.name == timer.name
            and one.at in (None, timer.at)
            and timer.phys < one.phys < before_phys
            and not one.was_lost
            for one in self.timers
        )

    def _note_lost(self) -> None:
        """Which timers the log does not have."""
        there = {one.record for one in self.disk.log}
        for timer in self.timers:
            timer.was_lost |= timer.record not in there

    def delete_files(self, archived_phys: int, *, is_late: bool) -> None:
        """Files of the log that are archived, as after its time. An archived one stays, which is not cut.
        ``is_late``: also one more that is not."""
        names = sorted(int(path.name) for path in (self.store.path / "commitlog").iterdir())
        for begin in names[:-2]:
            if begin + (1 if is_late else 2) * FILE_BYTES <= archived_phys or is_late:
                path = self.store.log_file(begin)
                if begin + FILE_BYTES > archived_phys and path.stat().st_nlink <= 2:
                    break  # pinned by both sidecars, of which either may own the archive
                path.unlink()
                self.disk.first_phys = begin + FILE_BYTES
                is_late = False

    def start_again(self, *, tears: bool, cuts: int, since_ms: int) -> None:
        """It was killed: a record may be torn, and its last ``cuts`` records, stored after ``since_ms``, were on a disk
        that lost power."""
        self.starts += 1
        self.find_queues()
        disk = self.disk
        if tears:
            path = self.store.log_file(disk.phys)
            if disk.phys % FILE_BYTES + 60 < FILE_BYTES and path.exists():
                with path.open("r+b") as file:
                    file.seek(disk.phys % FILE_BYTES)
                    file.write(struct.pack(">iI", 400, 0xDAA320A7) + self._random.randbytes(50))
        for _ in range(cuts):
            is_first = disk.first_phys and disk.log[-1].phys < disk.first_phys + FILE_BYTES
            if len(disk.log) < 2 or is_first or disk.log[-1].stored_ms < since_ms:
                break
            stored = disk.log.pop()
            disk.phys = stored.phys
            for queue, offset, _ in stored.places:
                if stored.phys >= disk.begins.get(queue, 0):
                    disk.ends[queue] = offset
                    if queue[0] != BATCHES:
                        self.store.put_unit(*queue, offset, bytes(20))
        disk.begins = {queue: min(begin, disk.phys) for queue, begin in disk.begins.items()}
        if cuts:
            self.recover()
            self._note_lost()

    def recreate(self) -> None:
        """A topic is deleted and created again: its offsets begin at 0."""
        shutil.rmtree(self.store.path / "consumequeue" / RECREATED, ignore_errors=True)
        for queue_id in range(QUEUES):
            self.disk.ends[RECREATED, queue_id] = 0
            self.disk.begins[RECREATED, queue_id] = self.disk.phys

    def save_disk(self, to: Path, now_ms: int) -> None:
        """Copy the disk, to be put back later."""
        shutil.copytree(self.store.path, to)
        self._saved.append((now_ms, to, deepcopy(self.disk)))

    def put_disk_back(self, now_ms: int, since_ms: int) -> bool:
        """The broker starts on a copy of its disk after ``since_ms``; the present one may be put back as well."""
        self._saved = [saved for saved in self._saved if saved[0] >= since_ms]
        if not self._saved:
            return False
        _, path, disk = self._saved.pop(self._random.randrange(len(self._saved)))
        self.save_disk(path.with_name(f"{path.name}+"), now_ms)
        shutil.rmtree(self.store.path)
        shutil.move(path, self.store.path)
        self.disk = disk
        self._note_lost()
        # Pins are of the other disk.
        self.lost |= {one.phys for one in disk.log if one.phys < disk.first_phys}
        self.starts += 1
        return True

    def recover(self) -> None:
        """Remove what is torn, as a start does."""
        for path in sorted((self.store.path / "commitlog").iterdir()):
            begin = int(path.name)
            if begin >= self.disk.phys and begin:
                path.unlink()
            elif begin + FILE_BYTES > self.disk.phys:
                os.truncate(path, self.disk.phys - begin)
                os.truncate(path, FILE_BYTES)

    # -- no other actor writes -----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Note what the disk is like: no other actor may write to it."""
        self._seen = self._listed()

    def disk_was_not_written_to(self) -> None:
        found = self._listed()
        assert found == self._seen, (
            f"the broker's disk was written to: {set(found.items()) ^ set(self._seen.items())}"
        )

    def _listed(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        folders = [str(self.store.path)]
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir():
                        folders.append(entry.path)
                    else:
                        status = entry.stat()
                        found[entry.path] = status.st_size, status.st_mtime_ns
        return found
