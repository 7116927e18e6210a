"""`tiered detach`: retire a broker so that nodes of `tiered mount` serve it; `--undo` takes it back."""

import argparse
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_json, add_places, add_writer_flags, settings_of
from rocketmq_tiered.process.allocator import return_freed_memory
from rocketmq_tiered.process.broker_control import PERM_NONE, BrokerControl
from rocketmq_tiered.process.broker_side import (
    address_of,
    credentials_of,
    names_of,
    open_store_of,
    read_conf,
    store_path,
    tls_of,
)
from rocketmq_tiered.process.detach import Detachment, DetachStep
from rocketmq_tiered.process.instance import backfill_instance, running_instances, state_root
from rocketmq_tiered.process.returned_broker import needs_groups, take_back
from rocketmq_tiered.process.uploader_job import UploaderJob, Writer
from rocketmq_tiered.server.mount.node_lease import BrokerName, announce_archive
from tiered.broker_store.conf import BrokerNames
from tiered.catalog.archives import open_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.claims import BACKFILL, refusal
from tiered.catalog.retirement import retired_since
from tiered.catalog.state import Owner
from tiered.clock import MACHINE_CLOCK
from tiered.console import print_json, print_lines
from tiered.errors import NotFoundError, UnavailableError, UsageError
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.request_metrics import StoreMetrics
from tiered.remoting.client import BrokerClient
from tiered.settings.quantities import duration_ms
from tiered.settings.sections import Settings
from tiered.timestamps import wall_ms
from uploader.offload_status import outcome_text

TIMEOUT_S = 10.0
STOP_S = 60.0
"""How long `tiered run` may take to stop."""
LOOK_S = 1.0
"""Between two looks at a condition that is awaited."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add store, archive and state directory, the broker, ``--undo``, ``--wait`` and ``--force``."""
    add_places(parser)
    add_writer_flags(parser)
    parser.add_argument(
        "--undo", action="store_true", help="take the broker back: clients can read and write at it again"
    )
    parser.add_argument(
        "--wait",
        metavar="DURATION",
        default="10m",
        help="how long to wait for clients to consume the rest, and for you to stop the broker (default 10m)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="continue although timers, delayed, transactional or popped messages are left: they are not delivered",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Retire the broker, so that `tiered mount` serves it from its archive, or take it back with ``--undo``. Continues
    where an earlier call stopped."""
    return_freed_memory()
    settings = settings_of(options).settings
    if not settings.archive.url:
        raise UsageError("archive.url is not set", hint="give --url file:///… or s3://…")
    wait_ms = duration_ms(options.wait)
    if wait_ms is None:
        raise UsageError(f"--wait {options.wait} is not a duration", hint="for example 10m")
    command = _Command(settings, wait_ms / 1000, as_json=options.json)
    try:
        if options.undo:
            command.undo()
        else:
            command.detach(force=options.force)
    finally:
        command.close()
        if options.json:
            print_json({"steps": [step._asdict() for step in command.steps]})
    return 0


class _Command:
    """Detaching one broker, or taking it back: the broker's store, a client of the broker, and the steps so far."""

    def __init__(self, settings: Settings, wait_s: float, *, as_json: bool) -> None:
        """Open the broker's store and a client of the broker. ``wait_s``: how long each step may wait for clients or
        the operator; ``as_json``: steps are not printed when they end."""
        self._settings, self._wait_s, self._as_json = settings, wait_s, as_json
        self._conf = read_conf(settings)
        self._store = open_store_of(settings, self._conf)
        self.names: BrokerNames = names_of(settings, self._store)
        address = address_of(settings, self._conf)
        if not address:
            raise UsageError(
                "the broker's address is unknown: neither broker.address nor broker.conf says it",
                hint="give --broker-address HOST:PORT or --broker-conf FILE",
            )
        self._client = BrokerClient(address, TIMEOUT_S, credentials_of(settings), tls_of(settings))
        self._broker = BrokerControl(self._client, self.names.cluster)
        self._detachment = Detachment(self._broker, wait_s, self._say, MACHINE_CLOCK)
        self.steps: list[DetachStep] = []

    def close(self) -> None:
        self._client.close()
        self._store.close()

    def _say(self, step: DetachStep) -> None:
        self.steps.append(step)
        if not self._as_json:
            print_lines(f"{step.name:<11} {step.state}")

    def _root(self) -> ObjectStore:
        return open_store(self._settings.archive.url, StoreOptions(self._settings.object_store))

    def detach(self, *, force: bool) -> None:
        """Make the broker read-only, wait until the operator stopped it, archive the rest of its log, and announce the
        archive to the nodes of `tiered mount`. An archive that is already retired is only announced again."""
        root = self._root()
        try:
            if not self._is_retired(root):
                if not self._store.liveness().is_dead:
                    self._detachment.close(force=force)
                    self._await_stop()
                elif not force and self._conf_permission() != PERM_NONE:
                    # Closing the broker sets this permission in broker.conf after consumers have consumed the rest.
                    raise UsageError(
                        "the broker was stopped before its consumer groups had committed their last offsets",
                        hint="start it and run tiered detach, or give --force: groups may repeat or lack messages",
                    )
                self._archive(root)
            self._say(
                DetachStep(
                    "archived", "done: the whole log is archived, and the archive is marked as retired"
                )
            )
            name = BrokerName(self.names.cluster, self.names.broker)
            announce_archive(root, name, load(open_archive(root, *name).store).queue_count)
            self._say(DetachStep("announced", "done: nodes of tiered mount serve the archive"))
        finally:
            root.close()

    def _is_retired(self, root: ObjectStore) -> bool:
        with suppress(NotFoundError):
            state = load(open_archive(root, self.names.cluster, self.names.broker).store)
            return retired_since(state) is not None
        return False

    def _conf_permission(self) -> int:
        text = "" if self._conf is None else self._conf.properties.get("brokerPermission", "")
        return int(text) if text.strip().isdecimal() else -1

    def _await_stop(self) -> None:
        """Wait until the operator has stopped the broker; only then is the end of its log final."""
        self._say(DetachStep("stopped", "waits: stop the broker now"))
        ends_s = time.monotonic() + self._wait_s
        while not self._store.liveness().is_dead:
            if time.monotonic() >= ends_s:
                raise UnavailableError(
                    f"the broker {self.names.broker} still runs, after {self._wait_s:.0f} s",
                    hint="stop the broker, then run tiered detach again",
                )
            time.sleep(LOOK_S)
        self._say(DetachStep("stopped", "done"))

    def _archive(self, root: ObjectStore) -> None:
        """Archive the rest of the stopped broker's log, in place of its `tiered run`, and mark the archive as
        retired."""
        self._end_instance()
        instance = backfill_instance(str(store_path(self._settings, self._conf)))
        writer = Writer(instance, BACKFILL, self._awaited_release(root, instance), retires=True)
        job = UploaderJob(self._settings, writer, StoreMetrics())
        result = job.offload(threading.Event(), follow=False)
        self._say(DetachStep("last part", f"done: {outcome_text(result)}"))

    def _awaited_release(self, root: ObjectStore, instance: str) -> bool:
        """Wait, up to ``--wait``, until the archive may be claimed: its writer has released it, or was a process of
        this host, which has ended without releasing it, as `tiered run` does if its broker stops at the same moment.
        Returns whether to take the archive over from such a writer."""
        host, is_said, ends_s = os.uname().nodename, False, time.monotonic() + self._wait_s
        while True:
            try:
                state = load(open_archive(root, self.names.cluster, self.names.broker).store)
            except NotFoundError:
                return self._settings.archive.take_over
            owner = state.owner
            may_take_over = self._settings.archive.take_over or (owner is not None and owner.host == host)
            claimant = Owner(instance, BACKFILL, host, wall_ms(), False)
            why = refusal(state, claimant, take_over=may_take_over, now_ms=claimant.claimed_ms)
            if not why or time.monotonic() >= ends_s:
                return may_take_over
            if not is_said:
                self._say(DetachStep("tiered run", f"waits until the archive's writer releases it: {why}"))
            is_said = True
            time.sleep(LOOK_S)

    def _end_instance(self) -> None:
        """Stop a `tiered run` of this host that follows the same store: it is the archive's writer, which this command
        becomes."""
        own = os.path.realpath(store_path(self._settings, self._conf))
        for instance in running_instances(state_root(os.environ)):
            if os.path.realpath(instance.store_path) == own:
                os.kill(instance.pid, signal.SIGTERM)
                ends_s = time.monotonic() + STOP_S
                while Path(f"/proc/{instance.pid}").exists() and time.monotonic() < ends_s:
                    time.sleep(LOOK_S / 5)
                self._say(DetachStep("tiered run", f"done: process {instance.pid} stopped"))

    def undo(self) -> None:
        """Take the broker back: clients can read and write at it again. If they have consumed from `tiered mount`, the
        broker first gets their offsets and unconsumed messages."""
        root = self._root()
        try:
            if self._store.liveness().is_dead:
                raise UnavailableError(
                    f"the broker {self.names.broker} does not run",
                    hint="start the broker, then run tiered detach --undo",
                )
            with suppress(NotFoundError):
                archive = open_archive(root, self.names.cluster, self.names.broker)
                if needs_groups(archive, load(archive.store)):
                    take_back(root, archive, self._client, self._say)
                    return
            self._detachment.undo()
        finally:
            root.close()
