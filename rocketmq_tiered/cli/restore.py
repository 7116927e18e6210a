"""`tiered restore`: make a broker's store directory from an archive."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocketmq_tiered.cli.arguments import (
    BROKER_FLAGS,
    add_archive,
    add_json,
    add_version,
    instant,
    print_result,
    settings_of,
)
from rocketmq_tiered.maintenance.restore.restoring import (
    FileBytes,
    RestoreReport,
    RestoreRequest,
    Restoring,
    noted_version,
)
from rocketmq_tiered.process.allocator import TABLE_BYTES_MIN, return_freed_memory
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.process.progress import Progress
from tiered.archive.index.rocketmq_index_file import (
    DEFAULT_ITEMS,
    DEFAULT_SLOTS,
    indexed_message,
    write_files,
)
from tiered.broker_store.conf import BrokerConf, read_broker_conf
from tiered.broker_store.restored_log import RestoredLog
from tiered.catalog.broker_facts import TABLE_NAMES, recorded_facts
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.console import camel_names, counted, time_text
from tiered.consume_queue.file_store import FileSizes
from tiered.consume_queue.store import BOTH_ON_5_5, StoreKind
from tiered.errors import UsageError
from tiered.formats.record import decode_record
from tiered.model.queue import SCHEDULE_TOPIC
from tiered.model.tables import QUEUE_HIDDEN

QUEUES = {kind.value: kind for kind in StoreKind} | {"none": None}
OWNER_LIVES_MS = 5 * 60_000
CLAMPED_SHOWN = 20
NOT_ARCHIVED = (
    "what the broker keeps in system topics: pending transactions, delayed and timer messages that were not delivered, "
    "pop checkpoints"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the new store, what is restored, and how it is written."""
    add_archive(parser, BROKER_FLAGS[:1])
    parser.add_argument(
        "store",
        metavar="STORE",
        type=Path,
        help="the broker's new store directory; it must be empty or not exist",
    )
    parser.add_argument(
        "--consume-queue",
        choices=list(QUEUES),
        help="write consume queues in files, in RocksDB or both (default: as broker.conf says, else in files); none: "
        "the broker builds them at its start",
    )
    parser.add_argument(
        "--layout",
        choices=("same", "compact"),
        default="same",
        help="same: each record keeps its physical offset (default); compact: records follow one another without gaps, "
        "which changes their offsetMsgIds",
    )
    parser.add_argument(
        "--topics",
        metavar="PATTERN",
        default="*",
        help="restore only messages of these topics, comma-separated patterns; all queues keep their offsets",
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        type=instant,
        default=0,
        help="restore only messages stored at or after this time",
    )
    add_version(parser)
    parser.add_argument("--index", action="store_true", help="also write index files, for queries by key")
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Make the store directory, then print what it lacks, and which settings broker.conf needs for it."""
    return_freed_memory(TABLE_BYTES_MIN)
    settings = settings_of(options).settings
    conf = read_broker_conf(Path(settings.broker.conf_path)) if settings.broker.conf_path else None
    with (
        open_for_reading(options.url, settings) as archive,
        Progress("restore", 0, quiet=options.json) as progress,
    ):
        target = options.store.absolute()
        state = _state(archive, target, options.at_version)
        request = RestoreRequest(
            target,
            state,
            _sizes(state, conf),
            _queue_kind(options.consume_queue, conf),
            tuple(filter(None, options.topics.split(","))),
            options.since,
            is_compact=options.layout == "compact",
        )
        index_sizes = _index_sizes(conf)
        restoring = Restoring(
            archive.store,
            request,
            progress=progress.update,
            finish=lambda log: _write_index(log, *index_sizes) if options.index else None,
        )
        report = restoring.run()
    summary = _Summary(archive, request, report, is_newest=state.cursor == archive.state.cursor)
    print_result(options, camel_names(summary.document()), summary.lines())
    return 0


def _state(archive: LoadedArchive, target: Path, at_version: int | None) -> CatalogState:
    """The state of the archive to restore: that of version ``at_version``, else the one that an interrupted restore to
    ``target`` began with, else the newest. Raises UsageError if the newest is meant and its writer still archives."""
    version = at_version or noted_version(target.with_name(f"{target.name}.restoring"))
    if version is not None:
        return load(archive.store, version=version)
    state = archive.state
    owner = state.owner
    if owner is not None and not owner.released:
        idle_ms = archive.store.clock_ms() - state.advanced_ms
        if idle_ms < OWNER_LIVES_MS:
            raise UsageError(
                f"{archive.title}: its writer {owner.instance} on {owner.host} committed {max(0, idle_ms) // 1000} s "
                "ago and may still archive",
                hint=f"stop that writer, or restore what is archived now with --at-version {state.version}",
            )
    return state


def _queue_kind(chosen: str | None, conf: BrokerConf | None) -> StoreKind | None:
    """The kind of consume queues to write: as ``--consume-queue`` says, else as broker.conf does; None: none."""
    if chosen is not None:
        return QUEUES[chosen]
    return StoreKind.FILE if conf is None else conf.queue_kind


def _sizes(state: CatalogState, conf: BrokerConf | None) -> FileBytes:
    """The sizes of commitlog and consume queue files: as ``conf`` says, by default a broker's defaults. Without
    ``conf`` as the archive recorded them. Raises UsageError if it did not."""
    facts, default = recorded_facts(state), FileSizes()
    if conf is None:
        if not facts.commitlog_file_bytes:
            raise UsageError(
                f"the archive {state.cluster}/{state.broker} does not record the size of the broker's commitlog files",
                hint="name its broker.conf: --broker-conf FILE",
            )
        queue_bytes = facts.consume_queue_file_bytes or default.plain_bytes
        return FileBytes(facts.commitlog_file_bytes, FileSizes(queue_bytes, default.batch_bytes))
    return FileBytes(
        _number(conf, "mappedFileSizeCommitLog", 1 << 30),
        FileSizes(
            _number(conf, "mappedFileSizeConsumeQueue", default.plain_bytes),
            _number(conf, "mapperFileSizeBatchConsumeQueue", default.batch_bytes),
        ),
    )


def _number(conf: BrokerConf, name: str, default: int) -> int:
    value = conf.properties.get(name, "").strip()
    if value and not value.isdecimal():
        raise UsageError(
            f"broker.conf: {name} = {value} is not a whole number", hint=f"correct it, or remove {name}"
        )
    return int(value or default)


def _index_sizes(conf: BrokerConf | None) -> tuple[int, int]:
    """Hash slots and items of each index file, as the broker's configuration says."""
    if conf is None:
        return DEFAULT_SLOTS, DEFAULT_ITEMS
    return _number(conf, "maxHashSlotNum", DEFAULT_SLOTS), _number(conf, "maxIndexNum", DEFAULT_ITEMS)


def _write_index(log: RestoredLog, slots: int, items: int) -> None:
    """Write the broker's index files for all messages of a restored log, each with so many hash ``slots`` and
    ``items``. Files that an interrupted restore has left there are deleted first."""
    directory = log.directory.parent / "index"
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    messages = (
        indexed_message(decode_record(batch.data[start : start + size].data), with_tags=False)
        for batch in log.batches()
        for start, size in zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True)
    )
    write_files(messages, directory, slots=slots, items=items)


class _Summary:
    """What a restore says at its end. ``is_newest``: the restored state is where the archive ends, so that the broker
    can continue it."""

    def __init__(
        self, archive: LoadedArchive, request: RestoreRequest, report: RestoreReport, *, is_newest: bool
    ) -> None:
        self._archive, self._request, self._report = archive, request, report
        self._is_newest = is_newest

    def document(self) -> Mapping[str, Any]:
        """What was restored and what is missing, as the JSON that ``--json`` prints."""
        units = self._report.units
        return {
            "store": str(self._request.target),
            "version": self._request.state.version,
            "messages": units.messages,
            "queues": len(self._report.selection.queues),
            "endedQueues": units.ended,
            "gapOffsets": units.gaps,
            "notRestored": list(self._missing()),
            "clampedOffsets": [one._asdict() for one in self._report.configuration.clamped],
            "brokerConf": self._conf(),
            "continuesAt": self._report.layout.end_phys,
            "continuesArchive": self._report.continues_archive and self._is_newest,
        }

    def lines(self) -> Iterator[str]:
        """What was restored, what is missing, and which settings broker.conf needs, as lines to print."""
        report, units, layout = self._report, self._report.units, self._report.layout
        files = -(-(layout.end_phys - layout.begin_phys) // layout.file_bytes)
        yield (
            f"{self._archive.title}, version {self._request.state.version}: {counted(units.messages, 'message')} of "
            f"{counted(len(report.selection.queues), 'queue')} in {counted(files, 'commitlog file')} in "
            f"{self._request.target}"
        )
        if units.ended:
            yield f"{counted(units.ended, 'queue')} without messages: they keep their offsets"
        if units.gaps:
            yield f"{counted(units.gaps, 'offset')} missing inside queues, as in the archive: consumers pass over them"
        if offsets := self._request.state.state_objects.get("consumer_offsets"):
            for stored in self._archive.store.list(offsets, limit=1):
                archived = time_text(stored.modified_ms)
                yield f"offsets of groups are those of {archived}: messages consumed later are delivered again"
        yield from (f"not restored: {what}" for what in self._missing())
        for one in report.configuration.clamped[:CLAMPED_SHOWN]:
            yield (
                f"offset lowered to the queue's end: group {one.group} on {one.topic} queue {one.queue_id} from "
                f"{one.offset} to {one.end_offset}"
            )
        if len(report.configuration.clamped) > CLAMPED_SHOWN:
            yield (
                f"offset lowered to the queue's end: {len(report.configuration.clamped) - CLAMPED_SHOWN} more, listed "
                "with --json"
            )
        yield "broker.conf needs:"
        yield from (f"  {name}={value}" for name, value in self._conf().items())
        if self._request.queues is StoreKind.BOTH:
            yield BOTH_ON_5_5
        if not report.continues_archive:
            yield "the compact log ends above the archive's end: give this store an archive.url of its own"
        elif self._is_newest:
            yield f"tiered run beside this broker continues the archive, at physical offset {layout.end_phys}"
        else:
            yield "the archive has newer versions: give this store an archive.url of its own"

    def _missing(self) -> Iterator[str]:
        """What the broker had and its restored store lacks, one line for each kind of loss."""
        state, report = self._request.state, self._report
        yield f"messages that were not archived: those above physical offset {state.cursor.phys}"
        if not any(key.topic == SCHEDULE_TOPIC for key in report.selection.queues):
            yield NOT_ARCHIVED
        for name in TABLE_NAMES:
            if name not in state.state_objects:
                yield f"{name}: the archive has no copy of this table of the broker"
        hidden = sum(bool(row["flags"] & QUEUE_HIDDEN) for _, row in state.queues())
        if hidden:
            yield f"{counted(hidden, 'hidden queue')}: deleted topics and earlier generations"
        if report.selection.absent_topics:
            topics = ", ".join(report.selection.absent_topics)
            in_rocksdb = self._request.queues is StoreKind.ROCKSDB
            why = (
                "RocksDB cannot have their consume queues of batches (BatchCQ)"
                if in_rocksdb
                else "their names cannot be names of directories: use --consume-queue rocksdb"
            )
            yield f"{topics}: {why}"
        if report.configuration.plain_topics:
            topics = ", ".join(report.configuration.plain_topics)
            yield f"cleanup.policy=COMPACTION of {topics}: set it again, or use --consume-queue none"

    def _conf(self) -> dict[str, str]:
        """The settings that broker.conf needs so that the broker finds this store and reads it as it was written."""
        request, queues = self._request, self._report.selection.queues.values()
        state, sizes = request.state, request.sizes
        conf = {
            "brokerClusterName": state.cluster,
            "brokerName": state.broker,
            "storePathRootDir": str(request.target),
            "storePathCommitLog": str(request.target / "commitlog"),
            "mappedFileSizeCommitLog": str(sizes.commitlog),
        }
        if request.queues is StoreKind.ROCKSDB:
            conf["storeType"] = "defaultRocksDB"
        if request.queues is StoreKind.BOTH:
            conf["rocksdbCQDoubleWriteEnable"] = "true"
        if request.queues is not StoreKind.ROCKSDB:
            conf["mappedFileSizeConsumeQueue"] = str(sizes.queues.plain_bytes)
        if any(queue.is_batch for queue in queues):
            conf["mapperFileSizeBatchConsumeQueue"] = str(sizes.queues.batch_bytes)
        if any(queue.is_lmq for queue in queues):
            conf |= {"enableLmq": "true", "enableMultiDispatch": "true"}
        if self._report.has_crc:
            conf["enabledAppendPropCRC"] = "true"
        return conf
