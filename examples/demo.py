"""`make demo`: a real broker's store becomes an archive, the store is deleted, and everything is read back.

The store was written by RocketMQ 5.3.3 and killed (SIGKILL) while three threads produced to it. Beside it is
the truth: what a Java client pulled from that broker afterwards. The demo runs the commands a user would run,
prints each, and compares the archive with the truth message by message. Exits non-zero when anything differs.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

PACK = Path(__file__).parent / "F-533-sigkill.tar.zst"
TIERED = Path(sys.executable).parent / "tiered"
COMPARED = ("commitLogOffset", "storeSize", "storeTimestamp", "tags", "bodySha256", "offsetMsgId", "recCrc32")


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave the archive behind")
    keep = parser.parse_args().keep
    directory = Path(tempfile.mkdtemp(prefix="tiered-demo-"))
    try:
        return _demo(directory)
    finally:
        if keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _demo(directory: Path) -> int:
    home = _unpack(directory)
    store, archive = home / "store", f"file://{directory / 'archive'}"
    logs = sorted((store / "commitlog").iterdir())
    _say(f"unpacked {home.name}: {len(logs)} commitlog files, {_allocated_mib(store):.1f} MiB on disk")
    started = time.monotonic()
    _run("backfill", str(store), archive, "--broker-conf", str(home / "broker.conf"))
    archived = _files(directory / "archive")
    size_mib = sum(path.stat().st_size for path in archived) / 2**20
    _say(f"archived in {time.monotonic() - started:.1f} s: {len(archived)} objects, {size_mib:.1f} MiB")

    _run("backfill", str(store), archive, "--broker-conf", str(home / "broker.conf"))
    added = _data_count(_files(directory / "archive")) - _data_count(archived)
    _say(f"a second run added {added} data objects")

    truth = _truth(home)
    shutil.rmtree(store)
    _say("deleted the broker's store: from here on there is only the archive")
    _run("ls", archive)
    _run("verify", archive, "--full")
    read = list(_read_all(archive))
    differences = _compare(truth, read)
    for line in differences[:10]:
        print(f"   {line}")
    if differences:
        _say(f"FAILED: {len(differences)} differences from the truth")
        return 1
    queues = len({(message["topic"], message["queueId"]) for message in read})
    _say(f"read back {len(read):,} messages of {queues} queues: all equal to what the broker had served")
    return 0


def _unpack(directory: Path) -> Path:
    with PACK.open("rb") as packed:
        stream = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(packed)
        with tarfile.open(fileobj=io.BufferedReader(stream), mode="r|") as pack:  # type: ignore[type-var]
            pack.extractall(directory, filter="data")
    (home,) = (path for path in directory.iterdir() if path.is_dir())
    return home


def _run(*arguments: str) -> None:
    print(f"$ tiered {shlex.join(arguments)}", flush=True)
    subprocess.run([TIERED, *arguments], check=True)


def _read_all(archive: str) -> Iterator[dict[str, Any]]:
    arguments = ("cat", archive, "--all", "--format", "jsonl")
    print(f"$ tiered {shlex.join(arguments)}", flush=True)
    with subprocess.Popen([TIERED, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "tiered cat")


def _truth(home: Path) -> list[dict[str, Any]]:
    with (home / "truth" / "messages.jsonl.zst").open("rb") as packed:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(packed), "utf-8")
        return [json.loads(line) for line in text]


def _compare(truth: list[dict[str, Any]], read: list[dict[str, Any]]) -> list[str]:
    expected = {_place(message): message for message in truth}
    differences = [f"more than once: {place}" for place, n in Counter(map(_place, read)).items() if n > 1]
    for message in read:
        original = expected.pop(_place(message), None)
        if original is None:
            differences.append(f"not in the truth: {_place(message)}")
            continue
        wrong = [name for name in COMPARED if name in original and message.get(name) != original[name]]
        if wrong:
            differences.append(f"{_place(message)} differs in {', '.join(wrong)}")
    return differences + [f"missing: {place}" for place in expected]


def _place(message: dict[str, Any]) -> tuple[str, int, int]:
    return message["topic"], message["queueId"], message["queueOffset"]


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def _data_count(paths: list[Path]) -> int:
    return len([path for path in paths if {"data", "sets"} & set(path.parts)])


def _allocated_mib(directory: Path) -> float:
    return sum(path.stat().st_blocks * 512 for path in _files(directory)) / 2**20


def _say(text: str) -> None:
    print(f"-- {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
