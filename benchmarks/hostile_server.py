"""The server of benchmarks/hostile.py: ``python -m benchmarks.hostile_server DIR --kind tiered|constant``.

One process, as in `tiered run`: an uploader follows a live store in a thread, and an event loop serves its archive in
another. Kind ``constant``: the loop reads frames and answers each with the same small reply, the least a server can do.
Writes a line of JSON with the address, then one for each commit, until its standard input closes. Owns the process.
"""

import argparse
import asyncio
import gc
import json
import sys
import threading
import time
from pathlib import Path

from benchmarks.live_store import read_word
from benchmarks.synthetic_store import StoreSpec
from fetcher.access import open_async_access
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.listen.options import MemoryShares
from rocketmq_tiered.server.retries.retry_log import RetryLog
from rocketmq_tiered.server.retries.retry_queue import RetryLimits, RetryQueues
from tiered.broker_store.bound import BrokerOffsets
from tiered.broker_store.store import open_broker_store
from tiered.clock import Clock
from tiered.kernels.scan import warm_up
from tiered.model.queue import TopicFilter
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.remoting.command import FRAME_BYTES_MAX, RemotingCommand, encode
from tiered.settings.sections import OffloadSettings, ServeSettings, Settings
from uploader.offload import Offloader, OffloadIdentity

CLUSTER, BROKER = "BenchCluster", "bench-a"
RATE, BODY_BYTES = 5_000, 256
POLL_S = 0.002
CONSTANT = encode(RemotingCommand(19, 1, flag=1))


def main() -> int:
    """Serve and upload until standard input closes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile_server", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=["tiered", "constant"], required=True)
    parser.add_argument("--start-ms", type=int, required=True)
    parser.add_argument("--batch-age-ms", type=int, required=True)
    options = parser.parse_args()
    stop, visible = threading.Event(), threading.Event()
    warm_up()
    uploader = threading.Thread(target=_upload, args=(options, stop, visible))
    uploader.start()
    try:
        asyncio.run(_serve(options.directory, options.kind, visible))
    finally:
        stop.set()
        uploader.join()
    return 0


def _say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _upload(options: argparse.Namespace, stop: threading.Event, visible: threading.Event) -> None:
    directory: Path = options.directory
    store = open_broker_store(directory / "store")
    archive = open_store(f"file://{directory / 'archive'}", StoreOptions(Settings().object_store))
    offloader = Offloader(
        store,
        archive,
        OffloadIdentity(CLUSTER, BROKER, "hostile", "run"),
        OffloadSettings(batch_age_ms=options.batch_age_ms),
        topic_filter=TopicFilter(),
        offsets_source=lambda: BrokerOffsets(max_phys=read_word(directory / "store")),
    )
    watching = threading.Thread(target=_watch, args=(offloader, options.start_ms, stop, visible))
    watching.start()
    try:
        offloader.run(stop, follow=True)
    finally:
        stop.set()
        visible.set()
        watching.join()
        store.close()
        archive.close()


def _watch(offloader: Offloader, start_ms: int, stop: threading.Event, visible: threading.Event) -> None:
    record_bytes = StoreSpec(topics=4, queues_per_topic=4, body_bytes=BODY_BYTES).record_bytes
    seen = 0
    while not stop.wait(POLL_S):
        status = offloader.status()
        committed = status.committed_phys if status is not None else 0
        if committed > seen:
            oldest_ms = start_ms + seen // record_bytes // (RATE // 1000)
            now_ms = time.time() * 1000
            _say(at_ms=now_ms, publish_ms=round(now_ms - oldest_ms, 1))
            seen = committed
            visible.set()


async def _serve(directory: Path, kind: str, visible: threading.Event) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, visible.wait)
    if kind == "constant":
        server = await loop.create_server(_Constant, "127.0.0.1", 0, backlog=1024)
        _say(address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()
        return
    settings = Settings(serve=ServeSettings(bind="127.0.0.1:0"))
    url = f"file://{directory / 'archive'}"
    access = open_async_access(url, cluster=CLUSTER, broker=BROKER, settings=settings)
    memory = MemoryShares(settings.serve.memory_bytes)
    archive = ServedArchive(access)
    await archive.load()
    log = GroupLog(
        access.store,
        "hostile",
        Clock(wall_ms=_now_ms),
        is_gone=lambda _: True,
        generation_of=access.generation,
    )
    offsets = GroupOffsets(log, lease_ms=settings.serve.lease_ms, take_over=True, bytes_max=memory.offsets)
    limits = RetryLimits(memory.retries, settings.serve.dead_letter_keep_ms)
    retries = RetryQueues(RetryLog(access.store, "hostile"), offsets, limits, Clock(wall_ms=_now_ms))
    service = ArchiveService(archive, offsets, retries, settings.serve)
    _say(address=await service.start())
    gc.collect()
    gc.freeze()  # as tiered serve
    watching = asyncio.create_task(archive.watch(settings.serve.refresh_ms / 1000))
    await loop.run_in_executor(None, sys.stdin.read)
    watching.cancel()
    await service.close(drain_s=0)
    access.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class _Constant(asyncio.Protocol):
    """Frames in, each read by its length alone and answered with CONSTANT."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._held = bytearray()

    def data_received(self, data: bytes) -> None:
        self._held += data
        while len(self._held) >= 4:
            length = int.from_bytes(self._held[:4], "big", signed=True)
            if not 4 <= length <= FRAME_BYTES_MAX - 4:
                self._transport.abort()
                return
            if len(self._held) < 4 + length:
                return
            del self._held[: 4 + length]
            self._transport.write(CONSTANT)


if __name__ == "__main__":
    sys.exit(main())
