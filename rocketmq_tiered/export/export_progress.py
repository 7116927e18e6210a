"""Progress records of an export, written by create-if-absent beside the data.

    _tiered_export/<number>.intent   catalog versions and choices of batch <number>, before any data
    _tiered_export/<number>.plan     its planned rows, before any data
    _tiered_export/<number>/<part>   a written part, with its rows and bytes
    _tiered_export/<number>.done     the complete batch, with the ends of all queues

The content and file names of a batch follow from its intent, so a repeat writes the same files: no message is lost or
duplicated, even by two exports at a time. The plan is recorded because the catalog pages it was made from may be
deleted before a killed export continues. Spark, Hive and Delta ignore names with a leading underscore.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
import zstandard

from tiered.errors import AlreadyExistsError, CorruptionError, NotFoundError
from tiered.formats.memory_bound import LARGE, MemoryBound, out_of_memory, stored_bytes_max
from tiered.object_store.interface import ObjectStore

DIRECTORY = "_tiered_export"
RAW_BYTES_MAX = 1 << 31


@dataclass(frozen=True)
class ArchiveVersion:
    """One archive at one catalog version. ``log_history``: its number."""

    cluster: str
    broker: str
    version: int
    log_history: int


@dataclass(frozen=True)
class Choices:
    """Choices that stay the same for all batches of an export."""

    format: str
    columns: tuple[str, ...]
    generation: int | None = None
    all_generations: bool = False


@dataclass(frozen=True)
class Intent:
    """The intent of batch ``number``. ``topics`` may change from batch to batch."""

    number: int
    choices: Choices
    topics: tuple[str, ...]
    archives: tuple[ArchiveVersion, ...]
    partition_bytes: int
    created_ms: int


@dataclass(frozen=True)
class ArchiveEnds:
    """One archive's [topic, queue id, generation, end] of all exported queues, and the gaps below the ends."""

    cluster: str
    broker: str
    log_history: int
    queues: Sequence[tuple[str, int, int, int]] = ()
    gaps: Sequence[tuple[str, int, int, int, int]] = ()


@dataclass(frozen=True)
class Done:
    """A complete batch."""

    number: int
    rows: int
    files: int
    size_bytes: int
    ends: Sequence[ArchiveEnds] = field(default_factory=tuple)


@dataclass(frozen=True)
class PartDone:
    """A part of a batch whose files are durable."""

    rows: int
    files: int
    size_bytes: int
    unreadable: Sequence[str] = ()
    """Damage that was skipped: queue, object and range."""
    names: Sequence[str] = ()
    """The names of the files, below the target."""
    rows_before: int = 0
    """How many of ``rows`` are in files that were there before, from another export or a killed one."""


class ExportProgress:
    """The records of one export. ``store`` is rooted at its data."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def last_number(self) -> int:
        """The number of the batch that was begun last; 0 if none was."""
        found = 0
        for info in self._store.list(f"{DIRECTORY}/"):
            name = info.key.removeprefix(f"{DIRECTORY}/")
            if name.endswith(".intent"):
                found = max(found, int(name.removesuffix(".intent")))
        return found

    def intent(self, number: int) -> Intent | None:
        """What a batch is to export, as it was recorded when the batch was begun; None if it was not."""
        document = self._read(f"{number:010d}.intent")
        if document is None:
            return None
        choices = document["choices"] | {"columns": tuple(document["choices"]["columns"])}
        return Intent(
            number=int(document["number"]),
            choices=Choices(**choices),
            topics=tuple(document["topics"]),
            archives=tuple(ArchiveVersion(**one) for one in document["archives"]),
            partition_bytes=int(document["partition_bytes"]),
            created_ms=int(document["created_ms"]),
        )

    def begin(self, intent: Intent) -> Intent:
        """Record ``intent``. Returns the recorded one, which another export may have written first."""
        if self._create(f"{intent.number:010d}.intent", asdict(intent)):
            return intent
        return self.intent(intent.number) or intent

    def plan(self, number: int) -> dict[str, Any] | None:
        """The recorded plan of a batch, or None."""
        return self._read(f"{number:010d}.plan")

    def keep_plan(self, number: int, document: Mapping[str, Any]) -> None:
        """Record the plan of a batch. Another export records the same plan."""
        self._create(f"{number:010d}.plan", document)

    def done(self, number: int) -> Done | None:
        """What a batch exported, as it was recorded at its end; None while it is not complete. Batch 0 stands in front
        of the first one and is empty."""
        if number == 0:
            return Done(0, 0, 0, 0)
        document = self._read(f"{number:010d}.done")
        if document is None:
            return None
        ends = ends_of(document)
        return Done(number, int(document["rows"]), int(document["files"]), int(document["size_bytes"]), ends)

    def finish(self, done: Done) -> None:
        """Record that a batch is complete. Another export records the same."""
        self._create(f"{done.number:010d}.done", asdict(done))

    def part(self, number: int, part: int) -> PartDone | None:
        """A finished part, or None."""
        document = self._read(f"{number:010d}/{part:08d}")
        return None if document is None else PartDone(**document)

    def finish_part(self, number: int, part: int, done: PartDone) -> None:
        """Record that the files of a part are durable."""
        self._create(f"{number:010d}/{part:08d}", asdict(done))

    def _create(self, name: str, document: Mapping[str, Any]) -> bool:
        body = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(orjson.dumps(document))
        try:
            self._store.put_if_absent(f"{DIRECTORY}/{name}", [body])
        except AlreadyExistsError:
            return False
        return True

    def _read(self, name: str) -> dict[str, Any] | None:
        """The document ``name`` of the export's progress; None if it does not exist. Raises CorruptionError if it is
        damaged."""
        key = f"{DIRECTORY}/{name}"
        try:
            data = self._store.get(key, stored_bytes_max())
        except NotFoundError:
            return None
        try:
            return _decoded(data, f"{self._store.url}/{key}")
        except (zstandard.ZstdError, ValueError) as error:
            raise CorruptionError(f"{self._store.url}/{key} is damaged: {error}") from error
        except MemoryError:
            raise out_of_memory(f"{self._store.url}/{key}") from None


def _decoded(data: bytes, source: str) -> dict[str, Any]:
    """The JSON object in a compressed document of an export's progress, called ``source`` in errors. Raises ValueError
    if it is not an object or claims too many bytes, and what MemoryBound and zstandard raise."""
    memory, raw_bytes = MemoryBound(len(data), LARGE, source), zstandard.frame_content_size(data)
    if not 0 <= raw_bytes <= RAW_BYTES_MAX:
        raise ValueError(f"it says that it has {raw_bytes} bytes")
    memory.charge(raw_bytes, "document")
    text = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_bytes)
    memory.charge_json(text, "document")
    document: dict[str, Any] = orjson.loads(text)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def ends_of(document: Mapping[str, Any]) -> tuple[ArchiveEnds, ...]:
    """Where a recorded batch ended, by archive and queue."""
    return tuple(
        ArchiveEnds(
            one["cluster"],
            one["broker"],
            int(one["log_history"]),
            tuple(map(tuple, one["queues"])),
            tuple(map(tuple, one["gaps"])),
        )
        for one in document["ends"]
    )
