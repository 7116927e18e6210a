"""How far an export is: records beside the data, made by create-if-absent, so that a killed export goes on rightly.

    _tiered_export/<number>.intent   what batch <number> will hold: catalog versions and choices, before any data
    _tiered_export/<number>.plan     where its rows are, as planned before the first of them was written
    _tiered_export/<number>/<part>   a part of it is written, with its rows and bytes
    _tiered_export/<number>.done     the batch is complete; where every queue ended

A batch's content and the names of its files follow from its intent alone, so whoever repeats it writes the same files:
nothing is lost or doubled, even by two exports at a time. The plan says no more than that, but what it was made from
may be garbage by the time a killed export goes on. Names that begin with an underscore are no data for Spark, Hive and
Delta. Owns the records; not what a batch is (export_plan.py) nor its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
import zstandard

from tiered.errors import AlreadyExistsError, CorruptionError, NotFoundError
from tiered.object_store.interface import ObjectStore

DIRECTORY = "_tiered_export"


@dataclass(frozen=True)
class ArchiveVersion:
    """One archive at one catalog version, in a log line."""

    cluster: str
    broker: str
    version: int
    line: int


@dataclass(frozen=True)
class Choices:
    """What an export keeps to from its first batch on."""

    format: str
    columns: tuple[str, ...]
    generation: int | None = None
    all_generations: bool = False


@dataclass(frozen=True)
class Intent:
    """Batch ``number``. ``topics`` may be other ones in every batch."""

    number: int
    choices: Choices
    topics: tuple[str, ...]
    archives: tuple[ArchiveVersion, ...]
    partition_bytes: int
    created_ms: int


@dataclass(frozen=True)
class ArchiveEnds:
    """Of one archive: [topic, queue id, generation, end] of all queues exported so far, and the gaps then below."""

    cluster: str
    broker: str
    line: int
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
    """One part of a batch: its files are durable."""

    rows: int
    files: int
    size_bytes: int


class ExportProgress:
    """The records of one export. ``store`` is rooted where its data is."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def last_number(self) -> int:
        """Of the newest intent; 0: none."""
        found = 0
        for info in self._store.list(f"{DIRECTORY}/"):
            name = info.key.removeprefix(f"{DIRECTORY}/")
            if name.endswith(".intent"):
                found = max(found, int(name.removesuffix(".intent")))
        return found

    def intent(self, number: int) -> Intent | None:
        """The intent of a batch, or None."""
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
        """Record ``intent``; another's, if it was faster."""
        if self._create(f"{intent.number:010d}.intent", asdict(intent)):
            return intent
        return self.intent(intent.number) or intent

    def plan(self, number: int) -> dict[str, Any] | None:
        """What ``keep_plan`` was given for a batch, or None."""
        return self._read(f"{number:010d}.plan")

    def keep_plan(self, number: int, document: Mapping[str, Any]) -> None:
        """Record the plan of a batch. Whoever else did so recorded the same."""
        self._create(f"{number:010d}.plan", document)

    def done(self, number: int) -> Done | None:
        """The end of a batch; of batch 0, which every export begins after, an empty one; None while incomplete."""
        if number == 0:
            return Done(0, 0, 0, 0)
        document = self._read(f"{number:010d}.done")
        if document is None:
            return None
        ends = ends_of(document)
        return Done(number, int(document["rows"]), int(document["files"]), int(document["size_bytes"]), ends)

    def finish(self, done: Done) -> None:
        """Record that a batch is complete. Whoever else did so recorded the same."""
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
        key = f"{DIRECTORY}/{name}"
        try:
            data = self._store.get(key)
        except NotFoundError:
            return None
        try:
            document: dict[str, Any] = orjson.loads(zstandard.ZstdDecompressor().decompress(data))
        except (zstandard.ZstdError, orjson.JSONDecodeError) as error:
            raise CorruptionError(f"{self._store.url}/{key}: damaged: {error}") from error
        return document


def ends_of(document: Mapping[str, Any]) -> tuple[ArchiveEnds, ...]:
    """The ``ends`` of a record."""
    return tuple(
        ArchiveEnds(
            one["cluster"], one["broker"], int(one["line"]),
            tuple(map(tuple, one["queues"])), tuple(map(tuple, one["gaps"])),
        )
        for one in document["ends"]
    )  # fmt: skip
