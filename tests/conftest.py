"""Fixtures every test may use (real broker stores, unpacked once), and which of several processes runs which test."""

import functools
import gc
import logging
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import botocore.session
import pytest
import zstandard
from hypothesis import settings
from xdist.remote import Producer

from rocketmq_tiered.cli import main
from tests.extended import is_extended
from tests.shared_out import LongestFirst, longest_first
from tests.sweeps import examples
from tiered.formats.memory_bound import LIMIT

pytest_plugins = ["tests.servers.fixtures"]

# The first example of a test may compile a kernel, and machines are shared: time is not what properties test.
settings.register_profile("tiered", deadline=None, max_examples=examples(100))
settings.load_profile("tiered")

# All S3 clients of a process share the SDK's description of the service, which takes longer to load than a test.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)

STORE_PACKS = Path(__file__).parent / "data" / "stores"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst | None:
    """See shared_out; other ways of sharing out stay what they are."""
    return LongestFirst(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `.ci/run` excludes. In a worker process: the order in which tests are given out."""
    for item in items:
        if is_extended(item.nodeid) and item.get_closest_marker("integration"):
            item.add_marker("extended")
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: garbage collection does not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_ends_with_the_test() -> Iterator[None]:
    """Commands that run in the tests' process set up logging to a stream that pytest closes behind the test."""
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # pytest's own are of other classes
            root.removeHandler(handler)
    root.setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _memory_settings_end_with_the_test() -> Iterator[None]:
    """The limit of decoding is the process's."""
    before = replace(LIMIT)
    yield
    LIMIT.limit_bytes, LIMIT.hint = before.limit_bytes, before.hint


@pytest.fixture(scope="session")
def real_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Unpacks a pack by the first part of its name ("A", "H2", …) and returns the directory that holds
    ``store/``, ``truth/`` and ``broker.conf``. Shared by all tests of a process: copy before changing anything."""
    unpacked: dict[str, Path] = {}

    def unpack(name: str) -> Path:
        if name not in unpacked:
            (pack,) = STORE_PACKS.glob(f"{name}-*.tar.zst")
            target = tmp_path_factory.mktemp(f"store-{name}-")
            decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            with (
                pack.open("rb") as packed,
                decompressor.stream_reader(packed) as stream,
                tarfile.open(fileobj=stream, mode="r|") as archive,
            ):
                archive.extractall(target, filter="data")
            (unpacked[name],) = target.iterdir()
        return unpacked[name]

    return unpack


@pytest.fixture
def home(real_store: Callable[[str], Path], tmp_path: Path) -> Path:
    """A store of one's own, whose broker is dead."""
    source = real_store("F")
    shutil.copytree(source / "store", tmp_path / "store")
    shutil.copy(source / "broker.conf", tmp_path / "broker.conf")
    return tmp_path


@pytest.fixture
def run(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs one command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))

    def execute(*arguments: object) -> tuple[int, str, str]:
        capsysbinary.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        output = capsysbinary.readouterr()
        return code, output.out.decode(), output.err.decode()

    return execute
