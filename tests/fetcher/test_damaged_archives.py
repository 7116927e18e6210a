"""A real archive with one object damaged: what is read is right, or an error that names the object; never less.

Every kind of object, every kind of damage, and every way of reading: queues from end to end, offsets by time, messages
by key and by id, and the catalog itself.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import rocketmq_tiered
from fetcher.archive import Archive
from fetcher.queries.time_search import Boundary
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex, living_runs
from tiered.errors import CorruptionError, TieredError
from tiered.formats.keys import archive_prefix, catalog_key
from tiered.object_store.file import FileStore
from tiered.settings.sections import IndexSettings

STORE = "B"
PREFIX = archive_prefix(CLUSTER, BROKER)
SETTINGS = replace(SMALL, split_bytes=64 << 10)
"""Queues have objects of their own as well as shares of common ones."""
TOPICS = ("t_keys", "t_tags", "t_bcq", "t_one")


@dataclass
class Scene:
    """An archive, and what every question about it is answered with."""

    directory: Path
    questions: dict[str, Callable[[Archive], Any]]
    answers: dict[str, Any]
    queues_of: dict[str, set[str]]
    """Data object to its topics."""


def questions_about(archive: Archive) -> dict[str, Callable[[Archive], Any]]:
    """Everything one can ask, by name; a question about a topic's queues begins with the topic."""
    found: dict[str, Callable[[Archive], Any]] = {}
    for topic in TOPICS:
        for listing in archive.queues(topic):
            found[f"{topic} {listing.queue_id} read"] = _read(topic, listing.queue_id)
            found[f"{topic} {listing.queue_id} times"] = _times(topic, listing.queue_id)
    messages = list(archive.queue("t_keys", 0).messages())
    for message in messages[:: len(messages) // 12]:
        assert message.unique_key is not None and message.offset_msg_id
        found[f"t_keys key {message.queue_offset}"] = _by_key("t_keys", message.unique_key)
        found[f"t_keys id {message.queue_offset}"] = _by_id(message.offset_msg_id)
    return found


def _read(topic: str, queue_id: int) -> Callable[[Archive], Any]:
    return lambda archive: [
        (message.queue_offset, bytes(message.data)) for message in archive.queue(topic, queue_id).messages()
    ]


def _times(topic: str, queue_id: int) -> Callable[[Archive], Any]:
    def ask(archive: Archive) -> Any:
        queue = archive.queue(topic, queue_id)
        first = queue.earliest_time()
        assert first is not None
        last = queue.timestamp_of(queue.max_offset - 1)
        assert last is not None
        steps = range(first - 1, last + 2, max(1, (last - first) // 9))
        return first, last, [queue.offset_by_time(time, side) for time in steps for side in Boundary]

    return ask


def _by_key(topic: str, key: str) -> Callable[[Archive], Any]:
    return lambda archive: [bytes(found.data) for found in archive.find_by_unique_key(topic, key)]


def _by_id(offset_msg_id: str) -> Callable[[Archive], Any]:
    def ask(archive: Archive) -> Any:
        found = archive.find_by_id(offset_msg_id)
        return None if found is None else bytes(found.data)

    return ask


@pytest.fixture(scope="module")
def scene(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Scene:
    directory = tmp_path_factory.mktemp("whole")
    index = IndexSettings(after_backfill=True, memory_bytes=1 << 20, day_files_max=64)
    backfill(real_store(STORE) / "store", FileStore(directory), settings=SETTINGS, index_settings=index)
    store = FileStore(directory / PREFIX)
    state = load(store)
    queues_of: dict[str, set[str]] = {}
    for page in living_runs(RunIndex(store), state):
        for run in page.chunk.runs:
            key = page.chunk.object_keys[int(page.chunk.objects["key"][run["object"]])]
            queues_of.setdefault(key, set()).add(page.queues[int(run["queue"])].topic)
    with rocketmq_tiered.open(f"file://{directory}") as archive:
        questions = questions_about(archive)
        answers = {name: ask(archive) for name, ask in questions.items()}
    assert len(answers) > 30 and all(answers.values())
    return Scene(directory, questions, answers, queues_of)


# -- damage -----------------------------------------------------------------------------------------------------


def objects_of(scene: Scene, kind: str) -> list[str]:
    """Keys of a kind that some question needs, those with most data first."""
    store = FileStore(scene.directory / PREFIX)
    if kind in ("data", "set"):
        prefix = {"data": "data/", "set": "sets/"}[kind]
        keys = [
            key for key, topics in scene.queues_of.items() if key.startswith(prefix) and topics & set(TOPICS)
        ]
    elif kind == "index":
        keys = [ref.key for ref in load(store).indexes]
    elif kind == "commit":
        state = load(store)
        keys = [catalog_key(version) for version in range(state.root.version + 1, state.version + 1)]
    elif kind == "root":
        keys = [load(store).root.key]
    return keys if kind in ("commit", "root") else sorted(keys, key=lambda key: -len(store.get(key)))


def flipped(at: Callable[[bytes], int]) -> Callable[[bytes, bytes], bytes]:
    """One bit of the byte at ``at``."""

    def flip(data: bytes, other: bytes) -> bytes:
        place = at(data)
        return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]

    return flip


DAMAGES: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "missing": lambda data, other: None,
    "empty": lambda data, other: b"",
    "truncated": lambda data, other: data[: len(data) * 2 // 3],
    "one byte short": lambda data, other: data[:-1],
    "one byte long": lambda data, other: data + b"\0",
    "flipped near the begin": flipped(lambda data: len(data) // 9),
    "flipped in the middle": flipped(lambda data: len(data) // 2),
    "flipped near the end": flipped(lambda data: len(data) - 70),
    "zeros in the middle": lambda data, other: (
        data[: len(data) // 3] + bytes(len(data) // 3) + data[len(data) // 3 * 2 :]
    ),
    "swapped": lambda data, other: other,
    "swapped, same length": lambda data, other: (other * (len(data) // len(other) + 1))[: len(data)],
}
SOME_DAMAGES = ("missing", "truncated", "flipped in the middle", "one byte long", "swapped")


def damaged_copy(scene: Scene, directory: Path, key: str, other: str, damage: str) -> None:
    """The archive with ``key`` damaged; everything else is linked."""
    shutil.copytree(scene.directory, directory, copy_function=os.link, dirs_exist_ok=True)
    path = directory / PREFIX / key
    content = DAMAGES[damage](path.read_bytes(), (directory / PREFIX / other).read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def ask_all(scene: Scene, directory: Path) -> dict[str, TieredError]:
    """Every question of a damaged archive: right answers are passed over, errors are returned."""
    errors: dict[str, TieredError] = {}
    try:
        archive = rocketmq_tiered.open(f"file://{directory}")
    except TieredError as error:
        return {"open": error}
    with archive:
        for name, ask in scene.questions.items():
            try:
                found = ask(archive)
            except TieredError as error:
                errors[name] = error
            else:
                assert found == scene.answers[name], f"{name}: a wrong answer"
    return errors


@pytest.mark.parametrize(
    ("kind", "damage"),
    sweep(
        [(kind, damage) for kind in ("data", "set", "index", "root", "commit") for damage in sorted(DAMAGES)],
        fast=[("set", damage) for damage in DAMAGES]
        + [(kind, damage) for kind in ("index", "root") for damage in SOME_DAMAGES],
    ),
)
def test_one_damaged_object(scene: Scene, kind: str, damage: str, tmp_path: Path) -> None:
    keys = objects_of(scene, kind)
    key, other = keys[0], keys[1] if len(keys) > 1 else objects_of(scene, "set")[0]
    damaged_copy(scene, tmp_path / "archive", key, other, damage)
    errors = ask_all(scene, tmp_path / "archive")
    for name, error in errors.items():
        assert isinstance(error, CorruptionError), (name, error)
        assert Path(key).name in str(error), f"{name}: {error} does not name {key}"
    if kind in ("data", "set"):
        topics = scene.queues_of[key]
        # A message of another topic is found by id among all objects of its part of the log.
        others = [name for name in errors if name.split()[0] not in topics and " id " not in name]
        assert not others, f"{topics} are in {key}, but {others} failed"
    if kind == "root":
        assert not errors, "the commits say what the root said"
        found = [
            anomaly.key for anomaly in verify_archive(FileStore(tmp_path / "archive" / PREFIX)).anomalies
        ]
        assert found == [key] * (damage != "one byte long"), "only verify reports it"
    elif kind == "index" and damage != "missing":
        assert not errors, "the segments say what the index said"
    elif damage in ("missing", "empty", "truncated", "swapped"):
        assert errors, "no reader noticed"
