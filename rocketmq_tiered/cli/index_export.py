"""`tiered index export`: write RocketMQ index files of an archive, with which a broker answers queryMessage."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from fetcher.queries.log_order import records_in_log_order
from rocketmq_tiered.cli.arguments import add_archive, add_json, print_result, settings_of, whole_number
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.process.progress import Progress
from tiered.archive.index.rocketmq_index_file import (
    DEFAULT_ITEMS,
    DEFAULT_SLOTS,
    IndexedMessage,
    check_sizes,
    indexed_message,
    write_files,
)
from tiered.console import counted, size_text
from tiered.errors import UsageError
from tiered.formats.record import decode_record
from tiered.whole_file import file_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`export`, ARCHIVE_URL, DIRECTORY and the broker's settings."""
    parser.add_argument("action", choices=("export",), help="the only action")
    add_archive(parser)
    parser.add_argument("directory", metavar="DIRECTORY", help="an empty or new directory for the files")
    sizes = ("--slots", DEFAULT_SLOTS, "maxHashSlotNum"), ("--items", DEFAULT_ITEMS, "maxIndexNum")
    for option, default, name in sizes:
        what = f"{name} of the broker (%(default)s)"
        parser.add_argument(option, type=whole_number, default=default, metavar="N", help=what)
    parser.add_argument("--with-tags", action="store_true", help="also index tags, as a 5.5 broker does")
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Read every record in log order and write the files. They contain physical offsets: only a broker whose commitlog
    has the records at these offsets can use them."""
    settings = settings_of(options).settings
    check_sizes(options.slots, options.items)
    directory = Path(options.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = next(directory.iterdir(), None) is None
    except OSError as error:
        raise file_error(error, directory) from error
    if not is_empty:
        raise UsageError(f"{directory} is not empty", hint="give a new directory")
    with (
        open_for_reading(options.url, settings) as archive,
        Progress("export", 0, quiet=options.json) as progress,
    ):
        count = _Count(archive, progress, with_tags=options.with_tags)
        paths = write_files(count.messages(), directory, slots=options.slots, items=options.items)
    found = f"{counted(count.keys, 'key')} of {counted(count.done, 'message')}"
    size = sum(path.stat().st_blocks * 512 for path in paths)
    line = (
        f"{archive.title}: {found} in {counted(len(paths), 'file')}, {size_text(size)} on disk, in {directory}; copy "
        "them to the index directory of a stopped broker"
    )
    document = {"files": [str(path) for path in paths], "messages": count.done, "keys": count.keys}
    print_result(options, document, [line])
    return 0


class _Count:
    """Messages of an archive in log order, counted."""

    def __init__(self, archive: LoadedArchive, progress: Progress, *, with_tags: bool) -> None:
        self._archive, self._progress, self._with_tags = archive, progress, with_tags
        self.done = self.keys = 0

    def messages(self) -> Iterator[IndexedMessage]:
        """All messages by physical offset."""
        total_bytes = self._archive.state.cursor.phys
        for data in records_in_log_order(self._archive.store, self._archive.state):
            message = indexed_message(decode_record(data), with_tags=self._with_tags)
            self.done += 1
            self.keys += len(message.keys)
            if self.done % 4096 == 0:
                self._progress.update(message.phys, total_bytes)
            yield message
        self._progress.update(total_bytes, total_bytes)
