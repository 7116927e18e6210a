"""The golden archive: a small archive kept as files, and what must be read from it.

``python -m tests.formats.golden_archive`` writes ``tests/data/golden/1.0``: until the first release whenever the format
changes, then never again: what was written must be readable for ever.
"""

import base64
import json
import random
import threading
from pathlib import Path
from typing import Any

from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.formats.segment_builder import RowSpec, RunSpec, Segment, build, whole
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.formats.container import encode_container
from tiered.formats.keys import state_key
from tiered.formats.segment import BlockCodec
from tiered.formats.segment_layout import PART_RUNS
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.file import FileStore
from tiered.settings.sections import IndexSettings
from uploader.index_builder import IndexBuilder

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
STATE_KIND = b"RMQTSTAT"
STATE_DOCUMENT = {"name": "topics", "document": {"topicConfigTable": {"golden": {"topicName": "golden"}}}}

PLAIN, OTHER = QueueKey("golden", 0, 0), QueueKey("%RETRY%golden/日", 3, 0)
BATCHED, LMQ = QueueKey("golden-batch", 1, 0), QueueKey("%LMQ%golden", 0, 0)


def _messages(cycle: int) -> list[Sent]:
    noise = bytes((i * i * 31 + cycle) % 251 for i in range(700))
    plain = [
        Sent(
            PLAIN,
            b'{"cycle": %d, "n": %d}' % (cycle, n),
            tags="TagA" if n % 2 else "",
            keys=(f"key-{cycle}-{n}",),
        )
        for n in range(8)
    ]
    return [
        *plain,
        Sent(PLAIN, b"light", lmq=[LMQ]),
        Sent(OTHER, noise, tags="日志"),
        Sent(OTHER, b"", offset=20 * cycle + 10),
        Sent(BATCHED, b"inner batch", inner_num=3 + cycle),
    ]


def write(directory: Path) -> None:
    """Build the archive and the file that says what is in it."""
    limits = CatalogLimits(root_every=4, spill_runs=8, page_runs_max=8, merge_sequences=2, merge_spills=2)
    builder = ArchiveBuilder(
        FileStore(directory / "archive"), limits=limits, codec=BlockCodec(block_bytes=900)
    )
    key = state_key("topics", builder.state.epoch, 1, "0123456789abcdef")
    builder.store.put_if_absent(key, [encode_container(STATE_KIND, STATE_DOCUMENT, {})])
    index = IndexBuilder(
        builder.store,
        builder.writer,
        IndexSettings(day_files_max=2),
        clock=Clock(wall_ms=lambda: NOW_MS),
        random_source=random.Random(2),
    )
    for cycle in range(9):
        builder.commit(
            _messages(cycle), as_set=cycle % 3 != 2, state_objects={"topics": key} if cycle == 0 else None
        )
        if cycle in (2, 4, 6):
            index.run_to_end(threading.Event())
    builder.writer.release()
    assert builder.state.pages and builder.state.root.key and builder.state.indexes
    (directory / "expected.json").write_text(json.dumps(_expected(builder), indent=1) + "\n")
    (directory / "parts.sso").write_bytes(whole(of_many_queues().encode()))


def of_many_queues() -> Segment:
    """A segment whose tail has two parts; its last run is of an LMQ."""
    queues = [QueueKey("golden", number, 0) for number in range(PART_RUNS)]
    specs = [RunSpec(number, 3, [RowSpec(b"%d" % number)]) for number in range(PART_RUNS)]
    light = RunSpec(PART_RUNS, 0, [RowSpec(b"77", parent=77, parent_queue_offset=3)], RunKind.LMQ)
    return build([*queues, LMQ], [*specs, light])


def _expected(builder: ArchiveBuilder) -> dict[str, Any]:
    queues = [
        {
            "queue": list(queue),
            "gaps": truth.gaps,
            "rows": [
                {
                    "offset": row.offset,
                    "inner_num": row.inner_num,
                    "phys": row.phys,
                    "tags_code": row.tags_code,
                    "store_timestamp": row.store_timestamp,
                    "record": base64.b64encode(row.record).decode(),
                }
                for row in truth.rows
            ],
        }
        for queue, truth in builder.truth.items()
    ]
    return {"version": builder.state.version, "phys": builder.state.cursor.phys, "queues": queues}


if __name__ == "__main__":
    write(GOLDEN / "1.0")
