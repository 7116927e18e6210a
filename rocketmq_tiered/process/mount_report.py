"""What the nodes of `tiered mount` serve: rows of `mount ls`, and the contents of a node's admin pages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import orjson
from prometheus_client.core import GaugeMetricFamily, Metric

from rocketmq_tiered.maintenance.cost import Prices
from rocketmq_tiered.process.event_loop_admin import EventLoopSource
from rocketmq_tiered.process.findings import Finding
from rocketmq_tiered.process.metrics import PREFIX, attention_family
from rocketmq_tiered.server.mount.mount_node import MountNode
from rocketmq_tiered.server.mount.node_lease import (
    AnnouncedArchives,
    BrokerName,
    MountRecord,
    NodeLease,
    NodeLog,
)
from tiered.clock import MACHINE_CLOCK
from tiered.console import camel_names, counted, size_text, time_text
from tiered.object_store.interface import ObjectStore
from tiered.timestamps import wall_ms

PRICES = Prices()
LATE_MS: Final = 60_000
"""Other nodes end a lease long before, whatever this machine's clock says: there is none."""
SERVED, LEAVING, NOT_REGISTERED, LATE, NOT_SERVED = STATES = (
    "served",
    "leaving",
    "not registered",
    "late",
    "not served",
)

HEADER: Final = (
    "broker",
    "node",
    "address",
    "since",
    "state",
    "queues",
    "consumers",
    "groups",
    "lag",
    "size",
    "USD/month",
)


class MountRow(NamedTuple):
    """A broker to be mounted, and the node that serves it, if any. ``state``: one of STATES; late is a node that has
    not renewed its lease for LATE_MS."""

    record: MountRecord
    node: str = ""
    state: str = NOT_SERVED

    @property
    def is_bad(self) -> bool:
        """Whether clients may not reach it."""
        return self.state not in (SERVED, LEAVING)

    @property
    def storage_usd_month(self) -> float:
        """The cost of storing its objects for a month, at list prices."""
        return round(PRICES.storage(self.record.stored_bytes), 2)

    def document(self) -> dict[str, Any]:
        """The row as `tiered mount ls --json` prints it."""
        return {
            **vars(self.record),
            "node": self.node,
            "state": self.state,
            "storage_usd_month": self.storage_usd_month,
        }

    def cells(self) -> list[str | int]:
        """The row as `tiered mount ls` prints it, under HEADER; ``-`` for what is not known."""
        record = self.record
        return [
            "/".join(record.name),
            self.node or "-",
            record.address or "-",
            time_text(record.since_ms) if record.since_ms else "-",
            f"{self.state}: {record.problem}" if record.problem else self.state,
            record.queues,
            record.consumers,
            record.groups,
            record.lag,
            size_text(record.stored_bytes),
            f"{self.storage_usd_month:.2f}",
        ]


def mount_rows(store: ObjectStore) -> list[MountRow]:
    """Rows of all brokers below ``store``. Raises what the store raises."""
    return rows_of(NodeLog(store, "", MACHINE_CLOCK).newest().values(), AnnouncedArchives(store).read())


def rows_of(leases: Iterable[NodeLease], announced: Mapping[BrokerName, int]) -> list[MountRow]:
    """A row for each broker that a running node of `tiered mount` serves, by its lease, and for each announced archive
    that none serves, in the order of names. ``announced``: the number of queues of each."""
    late_ms = wall_ms() - LATE_MS
    rows = [
        MountRow(record, lease.node, LATE if lease.renewed_ms < late_ms else _state_of(record))
        for lease in leases
        if lease.is_living
        for record in lease.mounts
    ]
    known = {row.record.name for row in rows if row.state != LEAVING}
    rows += [MountRow(MountRecord(*name, queues=announced[name])) for name in announced.keys() - known]
    return sorted(rows, key=lambda row: row.record.name)


def _state_of(record: MountRecord) -> str:
    if record.is_leaving:
        return LEAVING
    return NOT_REGISTERED if record.problem or not record.address else SERVED


def of_mounts(node: MountNode) -> list[Finding]:
    """What an operator of a node of `tiered mount` should look at: its lease is not renewed, objects of others lie
    among the leases, or a broker is not served or not registered."""
    found = []
    if node.problem:
        step = "check the object store; other nodes serve these brokers until the lease is renewed"
        found.append(
            Finding("mount-lease", f"this node's lease is not renewed: {node.problem}", step, is_bad=True)
        )
    if strangers := node.member.strangers:
        what = (
            f"{counted(len(strangers), 'object')} below mount.nodes/ not written by the node that the key names, "
            f"such as {strangers[0]}"
        )
        step = "find out who wrote it (SECURITY.md shows how to narrow who may), then delete it"
        found.append(Finding("mount-lease", what, step, is_bad=True))
    for name, why in sorted(node.failures.items()):
        what = f"{'/'.join(name)} is not mounted here: {why}"
        found.append(
            Finding(
                "mount", what, "correct the cause; mounting is tried again every few seconds", is_bad=True
            )
        )
    for record in node.records():
        if record.problem:
            what = f"{record.cluster}/{record.broker} is not registered at the name servers: {record.problem}"
            found.append(Finding("mount", what, "check the name servers (broker.name_servers)", is_bad=True))
    return found


class MountAdminSource(EventLoopSource):
    """What the admin address of `tiered mount` shows. ``nodes``: those of this process."""

    def __init__(self, nodes: Sequence[MountNode]) -> None:
        self.nodes = nodes
        super().__init__(MACHINE_CLOCK, self.families)

    def findings(self) -> list[Finding]:
        """What an operator should look at."""
        return [finding for node in self.nodes for finding in of_mounts(node)]

    def readiness(self) -> tuple[bool, str]:
        """Whether this node holds its lease."""
        texts = [finding.text for finding in self.findings()]
        holds = all(node.member.holds() for node in self.nodes)
        return holds, "\n".join(["serving" if holds else "no lease is held", *texts])

    def rows(self) -> list[MountRow]:
        """All brokers, as the nodes' leases say."""
        members = [node.member for node in self.nodes]
        return [row for member in members for row in rows_of(member.leases.values(), member.announced)]

    def status_json(self) -> bytes:
        """The answer of /status.json: the nodes of `tiered mount` in this process and their brokers, as JSON."""
        document = {
            "nodes": [
                {
                    "url": node.place.url,
                    "node": node.member.node,
                    "state": node.state.value,
                    "holdsLease": node.member.holds(),
                    "storeProblem": node.problem,
                    "moves": node.mounted_count,
                    "takeovers": node.member.takeovers,
                    "brokers": [camel_names(asdict(record)) for record in node.records()],
                    "failures": {f"{name.cluster}/{name.broker}": why for name, why in node.failures.items()},
                }
                for node in self.nodes
            ],
            "findings": [camel_names(asdict(finding)) for finding in self.findings()],
        }
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)

    def families(self) -> Iterator[Metric]:
        """The metrics of the nodes of `tiered mount` in this process at this moment, one family for each name."""
        nodes = self.nodes
        records = [record for node in nodes for record in node.records()]
        gauges = {
            "brokers": ("retired brokers served here", len(records)),
            "lease_held": (
                "1 while this node holds its lease",
                int(all(node.member.holds() for node in nodes)),
            ),
            "consumers": (
                "connected members of consumer groups",
                sum(record.consumers for record in records),
            ),
            "lag_messages": ("messages not consumed by groups", sum(record.lag for record in records)),
            "moves": ("times that a broker was mounted here", sum(node.mounted_count for node in nodes)),
            "unserved_brokers": (
                "retired brokers that no node serves",
                sum(row.state in (NOT_SERVED, LATE) for row in self.rows()),
            ),
        }
        for name, (meaning, value) in gauges.items():
            yield GaugeMetricFamily(f"{PREFIX}_mount_{name}", meaning, value=value)
        yield attention_family(self.findings())
