"""How far each queue was sent: a local file, replaced as a whole after the broker has confirmed.

    {"archive", "target", "isExact", "queues": [{"topic", "queueId", "generation", "to", "begin", "next"}, …]}

Offsets [begin, next) of a queue of the archive were sent to topic ``to`` of the target. Between two writes at most
REPEATS_MAX messages a queue are sent; only they may repeat, after a crash: ``isExact`` is written at an orderly end.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tiered.errors import UsageError
from tiered.model.queue import QueueKey
from tiered.private_directory import check_trusted_file
from tiered.whole_file import file_error, save_whole

REPEATS_MAX = 200
"""At most so many sent messages of a queue are not in the file: confirmed ones, and the one in flight."""


class Sending(NamedTuple):
    """A queue of the archive, and the topic that its messages are sent to."""

    queue: QueueKey
    to: str


@dataclass
class SentRange:
    """Offsets [begin, next). ``unsaved``: messages sent since the file was written."""

    begin: int
    next: int
    unsaved: int = 0


class Position:
    """The file ``path`` for one archive and target, by their names. Raises UsageError for one of others."""

    def __init__(self, path: Path, archive: str, target: str) -> None:
        """Load the position file ``path`` if it exists; without one nothing was sent yet."""
        self.path, self._archive, self._target = path, archive, target
        self._ranges: dict[Sending, SentRange] = {}
        self.is_exact = True
        """False if the last process was interrupted: it may have sent messages that the file does not have."""
        try:
            check_trusted_file(path, "--position", is_secret=False)
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(
                f"the position file {path} cannot be read: {error.strerror}",
                hint="name another file with --position, or let this user read it",
            ) from error
        self._load(content)

    @property
    def is_new(self) -> bool:
        """Whether nothing was sent."""
        return not self._ranges

    def begin(self, sending: Sending, start: int) -> int:
        """Return the offset at which sending of a queue continues, if its first message to send is at offset ``start``.
        The file holds one range of sent offsets for each queue: it raises UsageError if ``start`` lies before that."""
        sent_range = self._ranges.get(sending)
        # Nothing was sent, or all that is to be sent now lies behind what was sent: a new range.
        if sent_range is None or sent_range.begin == sent_range.next or start > sent_range.next:
            self._ranges[sending] = SentRange(start, start)
            return start
        if start < sent_range.begin:
            raise UsageError(
                f"{self.path}: {sending.queue} was sent from offset {sent_range.begin} on, and cannot be sent from the"
                f" earlier offset {start}",
                hint="to send the earlier messages, run the command with --until TIME and another file for --position",
            )
        return sent_range.next

    def sent(self, sending: Sending, next_offset: int) -> int:
        """Note that the target has stored everything of a queue below ``next_offset``. Returns how many sent messages
        of the queue the file does not have yet."""
        sent_range = self._ranges[sending]
        sent_range.next = next_offset
        sent_range.unsaved += 1
        return sent_range.unsaved

    def unsaved(self, sending: Sending) -> int:
        """Messages of a queue that the file does not have."""
        return self._ranges[sending].unsaved

    def document(self, *, is_exact: bool) -> bytes:
        """Return what the file is to contain now, as JSON. ``is_exact`` false: messages may be sent while it is
        written, so that after a crash some may have been sent which the file does not have."""
        queues = [
            {"topic": queue.topic, "queueId": queue.queue_id, "generation": queue.generation, "to": to}
            | {"begin": sent_range.begin, "next": sent_range.next}
            for (queue, to), sent_range in self._ranges.items()
        ]
        whole = {"archive": self._archive, "target": self._target, "isExact": is_exact, "queues": queues}
        return json.dumps(whole).encode()

    def snapshot(self) -> dict[Sending, int]:
        """Return for each queue how many sent messages the present document has and the file has not."""
        return {
            sending: sent_range.unsaved for sending, sent_range in self._ranges.items() if sent_range.unsaved
        }

    def write(self, document: bytes) -> None:
        """Replace the file, synced. May run in a thread. Raises what file_error returns."""
        save_whole(self.path, document)

    def written(self, snapshot: dict[Sending, int]) -> None:
        """Note that the file now has the messages that ``snapshot`` counted."""
        for sending, count in snapshot.items():
            self._ranges[sending].unsaved -= count

    def _load(self, content: bytes) -> None:
        """Take the ranges of sent offsets from a position file. Raises UsageError if it is no position file, or that of
        another archive or target."""
        try:
            document: dict[str, Any] = json.loads(content)
            names = str(document["archive"]), str(document["target"])
            self.is_exact = bool(document["isExact"])
            for entry in document["queues"]:
                queue = QueueKey(str(entry["topic"]), int(entry["queueId"]), int(entry["generation"]))
                sent_range = SentRange(int(entry["begin"]), int(entry["next"]))
                self._ranges[Sending(queue, str(entry["to"]))] = sent_range
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path} is not a position file of tiered republish",
                hint="name another file with --position",
            ) from error
        if names != (self._archive, self._target):
            raise UsageError(
                f"{self.path} says how far {names[0]} was sent to {names[1]}, not how far {self._archive} was sent to"
                f" {self._target}",
                hint="name another file with --position",
            )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes of tiered republish from using the position file ``path``, by a lock on a file beside it.
    Raises UsageError while another process holds the lock."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise file_error(error, lock) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(
            f"another tiered republish uses the position file {path}",
            hint="wait until it has ended, or name another file with --position",
        ) from None
    finally:
        os.close(fd)
