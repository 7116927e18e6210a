"""Leases of nodes: numbered objects below ``mount.nodes/<node>/``, newest first, each created only if absent.

A node renews its lease by writing the next version. If that is taken, the node is fenced: a later process of its name
has started, or another node has seen it silent and ended its lease. No clock of another node is read. Brokers to be
mounted are objects below ``mount.archives/``. Neither name can be a cluster's: escapes have hex digits after a dot.
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import (
    AlreadyExistsError,
    CorruptionError,
    FencedError,
    NotFoundError,
    ObjectTooLargeError,
    OutOfMemoryError,
    UnsupportedFormatError,
)
from tiered.formats.container import decode_container, encode_container
from tiered.formats.keys import archive_prefix, escape, is_version_name, version_name
from tiered.formats.memory_bound import LARGE, stored_bytes_max
from tiered.object_store.interface import ObjectStore

logger = logging.getLogger(__name__)

NODES: Final = "mount.nodes/"
ARCHIVES: Final = "mount.archives/"
LEASE_KIND: Final = b"RMQTNODE"
ARCHIVE_KIND: Final = b"RMQTMOUN"
VERSIONS_KEPT: Final = 3
STRANGERS_MAX: Final = 16
"""Objects in a row that are no leases of a node, before its own lease is looked for no longer."""
PUT_S: Final = 5.0
"""A renewal without a reply for so long is tried again: the lease ends soon after."""
STRANGE: Final = (CorruptionError, UnsupportedFormatError, ObjectTooLargeError, OutOfMemoryError)
"""Errors of reading an object that no node wrote, or a newer program."""


class NodeState(StrEnum):
    """``ENDED``: by another node, which saw it silent."""

    ACTIVE = "active"
    DRAINING = "draining"
    LEFT = "left"
    ENDED = "ended"


class BrokerName(NamedTuple):
    """A broker, by its archive."""

    cluster: str
    broker: str


@dataclass(frozen=True)
class MountRecord:
    """A broker as its holder serves it. ``address``: empty while it is opened; ``is_leaving``: released; reads are
    served until clients have moved."""

    cluster: str
    broker: str
    address: str = ""
    since_ms: int = 0
    queues: int = 0
    consumers: int = 0
    groups: int = 0
    lag: int = 0
    """Messages that groups have not consumed."""
    stored_bytes: int = 0
    is_leaving: bool = False
    problem: str = ""

    @property
    def name(self) -> BrokerName:
        """The broker that is mounted."""
        return BrokerName(self.cluster, self.broker)


@dataclass(frozen=True)
class NodeLease:
    """One version. ``process``: random id of the process that keeps it."""

    node: str
    process: str
    version: int
    state: NodeState
    renewed_ms: int
    """When the lease was renewed, by the node's clock; only shown."""
    mounts: tuple[MountRecord, ...] = ()

    @property
    def lease(self) -> str:
        """The name of this lease in snapshots of groups."""
        return f"{self.node}/{self.process}"

    @property
    def is_living(self) -> bool:
        """Whether its node still holds what it lists."""
        return self.state in (NodeState.ACTIVE, NodeState.DRAINING)


def lease_key(node: str, version: int) -> str:
    """Key of a version; newer versions of a node sort first."""
    return f"{NODES}{escape(node)}/{version_name(version)}"


def encode_lease(lease: NodeLease) -> bytes:
    """The object's bytes."""
    return encode_container(
        LEASE_KIND, {**vars(lease), "mounts": [vars(record) for record in lease.mounts]}, {}
    )


def decode_lease(data: bytes, *, source: str) -> NodeLease:
    """Return the lease in an object's bytes. Raises CorruptionError or UnsupportedFormatError with the object's address
    ``source``."""
    header = decode_container(data, LEASE_KIND, source=source, allowance=LARGE).header
    try:
        mounts = tuple(MountRecord(**record) for record in header.pop("mounts"))
        return NodeLease(**{**header, "state": NodeState(header["state"]), "mounts": mounts})
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"{source}: this lease of a node of tiered mount is damaged: {error!r}"
        ) from error


class NodeLog:
    """Reads all leases below a prefix and writes one as a process. Blocking; not thread-safe."""

    def __init__(self, store: ObjectStore, node: str, clock: Clock) -> None:
        """``store``: the prefix that the nodes share; ``node``: whose lease ``join`` begins and ``renew`` renews; those
        of other nodes are only read, or ended."""
        self.store, self.node, self._clock = store, node, clock
        self._own: NodeLease | None = None
        self._read: dict[str, NodeLease] = {}
        """Leases that were read, by key."""
        self.strangers: set[str] = set()
        """Keys of objects that are no leases of the node whose name they have: as if they were absent."""
        self.foreign: set[str] = set()
        """Keys of leases in another format: a newer program may keep them."""

    @property
    def lease(self) -> str:
        """The name of this process's lease in snapshots of groups; empty before ``join``."""
        return "" if self._own is None else self._own.lease

    def join(self) -> None:
        """Take the node's name as a new process, which fences an earlier one."""
        newest = self.newest().get(self.node)
        version = 1 if newest is None else newest.version + 1
        self._put(
            NodeLease(self.node, secrets.token_hex(8), version, NodeState.ACTIVE, self._clock.wall_ms())
        )

    def renew(self, state: NodeState, mounts: Sequence[MountRecord]) -> None:
        """Renew the lease by writing its next version, with the node's state and the brokers that it serves. Raises
        FencedError if this process has lost its lease. After other errors the version may exist: the next call finds
        that out."""
        own = self._own
        if own is None:
            raise FencedError(
                f"node {self.node} of tiered mount holds no lease of the archive: it takes one when it starts again"
            )
        self._put(
            replace(
                own,
                version=own.version + 1,
                state=state,
                renewed_ms=self._clock.wall_ms(),
                mounts=tuple(mounts),
            )
        )

    def _put(self, wanted: NodeLease) -> None:
        """Write the next version of this process's lease. A version that exists already may be our own, whose reply was
        lost; with any other the lease is lost, and FencedError is raised."""
        found = self._next(wanted, PUT_S)
        while found is not None:
            if found == replace(wanted, version=found.version):
                self._own = found
                return
            if found.process != wanted.process or not found.is_living:
                break
            # Our own, whose reply was lost, with older content.
            found = self._next(replace(wanted, version=found.version + 1), PUT_S)
        self._own = None
        raise FencedError(
            f"the lease of node {self.node} was ended by another node, or by a later process of its name"
        )

    def _next(self, wanted: NodeLease, timeout_s: float | None = None) -> NodeLease | None:
        """Write ``wanted`` under its version, or under the next one whose object is a lease or absent: objects that no
        node wrote (``strangers``) are skipped, up to STRANGERS_MAX of them. Returns the lease that the object now has,
        perhaps another process's; None if it was removed since, or too many objects are no leases."""
        for version in range(wanted.version, wanted.version + STRANGERS_MAX):
            lease, key = replace(wanted, version=version), lease_key(wanted.node, version)
            try:
                self.store.put_if_absent(key, [encode_lease(lease)], timeout_s=timeout_s)
            except AlreadyExistsError:
                found = self._get(key)
                if key not in self.strangers:
                    return found
            else:
                return lease
        return None

    def newest(self) -> dict[str, NodeLease]:
        """Return the newest lease of every node by its name, and delete old versions of our own. Raises FencedError if
        this process's lease is not its node's newest: the process slept while another one wrote and removed
        versions."""
        keys_of: dict[str, list[str]] = {}
        for info in self.store.list(NODES):
            folder, _, version = info.key.rpartition("/")
            if is_version_name(version):
                keys_of.setdefault(folder, []).append(info.key)
        read = {}
        self.strangers &= {key for keys in keys_of.values() for key in keys}
        for keys in keys_of.values():
            for key in keys[:STRANGERS_MAX]:  # the newest comes first
                if (lease := self._get(key)) is not None:
                    read[key] = lease
                    break
        self._read = read
        leases = {lease.node: lease for lease in read.values()}
        own = self._own
        if own is not None:
            if (newest := leases.get(self.node)) is None or newest.version != own.version:
                self._own = None
                raise FencedError(
                    f"node {self.node} lost its lease: another node ended it, or a process with the same node name "
                    "was started later"
                )
            own_key = lease_key(self.node, own.version)
            # Names of versions count down, so that the newest is listed first.
            older = [key for key in keys_of[own_key.rpartition("/")[0]] if key > own_key]
            if stale := older[VERSIONS_KEPT - 1 :]:
                self.store.delete(stale)
        return leases

    def _get(self, key: str) -> NodeLease | None:
        """Return the lease that the object ``key`` has; None if it was removed since the listing, or is no lease of the
        node and version in its key. Such an object is logged once and ignored."""
        if (known := self._read.get(key)) is not None or key in self.strangers:
            return known
        try:
            lease = decode_lease(self.store.get(key, stored_bytes_max()), source=f"{self.store.url}/{key}")
        except NotFoundError:
            return None
        except STRANGE as error:
            reason = str(error)
            if isinstance(error, UnsupportedFormatError):
                self.foreign.add(key)
        else:
            if lease_key(lease.node, lease.version) == key:
                return lease
            reason = f"it is version {lease.version} of the lease of node {lease.node}"
        self.strangers.add(key)
        logger.warning("object %s is not the lease that its key names, and is ignored: %s", key, reason)
        return None

    def end(self, silent: NodeLease) -> NodeLease | None:
        """End the lease of a silent node: it cannot renew ``silent``. None: it was renewed after all."""
        found = self._next(replace(silent, version=silent.version + 1, state=NodeState.ENDED))
        return found if found is not None and found.state is NodeState.ENDED else None


def lapsed_leases(store: ObjectStore) -> Callable[[str], bool]:
    """Return a function that tells whether a lease, by its name NODE/PROCESS, has ended. It reads the leases below
    ``store`` at each call, as those read earlier may be of an earlier process of the node. A lease in a newer format
    counts as one that has not ended."""

    def has_lapsed(lease: str) -> bool:
        log = NodeLog(store, "", MACHINE_CLOCK)
        folder = lease_key(lease.rpartition("/")[0], 0).rpartition("/")[0]
        newest = log.newest().values()
        is_unknown = any(key.rpartition("/")[0] == folder for key in log.foreign)
        return not is_unknown and not any(each.lease == lease and each.is_living for each in newest)

    return has_lapsed


# -- brokers to be mounted ------------------------------------------------------------------------------------


def archive_key(name: BrokerName) -> str:
    """Key of the object that asks nodes to mount a broker."""
    return f"{ARCHIVES}{archive_prefix(*name)}"


def announce_archive(store: ObjectStore, name: BrokerName, queues: int) -> None:
    """Ask the nodes below ``store`` to mount a retired broker. Idempotent."""
    header = {"cluster": name.cluster, "broker": name.broker, "queues": queues}
    try:
        store.put_if_absent(archive_key(name), [encode_container(ARCHIVE_KIND, header, {})])
    except AlreadyExistsError:
        return


def withdraw_archive(store: ObjectStore, name: BrokerName) -> None:
    """Ask the nodes not to mount a broker any more."""
    store.delete([archive_key(name)])


class AnnouncedArchives:
    """Brokers to be mounted, with their queues; objects are read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[str, tuple[BrokerName, int]] = {}

    def read(self) -> Mapping[BrokerName, int]:
        """Return the brokers that are to be mounted now, with the number of queues of each. A damaged announcement is
        logged and skipped. Raises the errors of the object store."""
        known = {}
        for info in self._store.list(ARCHIVES):
            try:
                known[info.key] = self._known.get(info.key) or self._parsed(info.key)
            except NotFoundError:
                continue  # withdrawn since the listing
            except STRANGE as error:
                logger.warning("an announcement of a broker to be mounted is ignored: %s", error)
        self._known = known
        return dict(known.values())

    def _parsed(self, key: str) -> tuple[BrokerName, int]:
        """Return the broker that the object ``key`` announces, and the number of its queues. Raises CorruptionError if
        the object is damaged, or its key is not the broker's."""
        source = f"{self._store.url}/{key}"
        data = self._store.get(key, stored_bytes_max())
        header = decode_container(data, ARCHIVE_KIND, source=source, allowance=LARGE).header
        try:
            name, queues = BrokerName(str(header["cluster"]), str(header["broker"])), int(header["queues"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"{source}: this announcement of a broker to be mounted is damaged: {error!r}"
            ) from error
        if archive_key(name) != key:
            raise CorruptionError(
                f"{source}: this announcement is of another broker, {name.cluster}/{name.broker}"
            )
        return name, queues
