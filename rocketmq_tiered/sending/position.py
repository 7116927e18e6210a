"""How far each queue was sent: a local file, replaced as a whole after the broker has confirmed.

    {"archive", "target", "isExact", "queues": [{"topic", "queueId", "generation", "to", "begin", "next"}, …]}

Offsets [begin, next) of a queue of the archive were sent to topic ``to`` of the target. Between two writes at most
REPEATS_MAX messages a queue are sent; only they may repeat, after a crash: ``isExact`` is written at an orderly end.
"""

from __future__ import annotations

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
"""Messages of a queue that are sent and not in the file: confirmed ones, and the one in flight."""


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
        """Load the file if it exists; without one nothing was sent yet."""
        self.path, self._archive, self._target = path, archive, target
        self._ranges: dict[Sending, SentRange] = {}
        self.is_exact = True
        """Whether nothing was sent beyond it."""
        try:
            check_trusted_file(path, "--position", is_secret=False)
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        self._load(content)

    @property
    def is_new(self) -> bool:
        """Whether nothing was sent."""
        return not self._ranges

    def begin(self, sending: Sending, start: int) -> int:
        """Where to continue a queue whose first message to send is at ``start``. Raises UsageError if earlier ones than
        were sent at first are to be sent now."""
        found = self._ranges.get(sending)
        if found is None or found.begin == found.next or start > found.next:
            self._ranges[sending] = SentRange(start, start)
            return start
        if start < found.begin:
            raise UsageError(
                f"{self.path}: {sending.queue} was sent from offset {found.begin}, and this begins at {start}",
                hint="send the rest with --until and another --position",
            )
        return found.next

    def sent(self, sending: Sending, next_offset: int) -> int:
        """Everything below ``next_offset`` is stored at the target; the messages that the file does not have."""
        found = self._ranges[sending]
        found.next = next_offset
        found.unsaved += 1
        return found.unsaved

    def unsaved(self, sending: Sending) -> int:
        """Messages of a queue that the file does not have."""
        return self._ranges[sending].unsaved

    def document(self, *, is_exact: bool) -> bytes:
        """The file's content now."""
        queues = [
            {"topic": queue.topic, "queueId": queue.queue_id, "generation": queue.generation, "to": to}
            | {"begin": found.begin, "next": found.next}
            for (queue, to), found in self._ranges.items()
        ]
        whole = {"archive": self._archive, "target": self._target, "isExact": is_exact, "queues": queues}
        return json.dumps(whole).encode()

    def snapshot(self) -> dict[Sending, int]:
        """How many messages of each queue the document of now has that the file has not."""
        return {sending: found.unsaved for sending, found in self._ranges.items() if found.unsaved}

    def write(self, document: bytes) -> None:
        """Replace the file, synced. May run in a thread. Raises what file_error returns."""
        save_whole(self.path, document)

    def written(self, snapshot: dict[Sending, int]) -> None:
        """The file has what ``snapshot`` counted."""
        for sending, count in snapshot.items():
            self._ranges[sending].unsaved -= count

    def _load(self, content: bytes) -> None:
        """Take the ranges of a file, or refuse one that is not ours or belongs to another archive or target."""
        try:
            document: dict[str, Any] = json.loads(content)
            names = str(document["archive"]), str(document["target"])
            self.is_exact = bool(document["isExact"])
            for one in document["queues"]:
                queue = QueueKey(str(one["topic"]), int(one["queueId"]), int(one["generation"]))
                self._ranges[Sending(queue, str(one["to"]))] = SentRange(int(one["begin"]), int(one["next"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path} is not a position file of tiered republish", hint="name another --position"
            ) from error
        if names != (self._archive, self._target):
            raise UsageError(
                f"{self.path} is the position of {names[0]} to {names[1]}, not of {self._archive} to {self._target}",
                hint="name another --position",
            )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes from ``path`` by a lock file beside it. Raises UsageError while one holds it."""
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
            f"another tiered republish uses {path}", hint="wait for it, or name another --position"
        ) from None
    finally:
        os.close(fd)
