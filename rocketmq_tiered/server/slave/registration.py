"""Whether and when slave mode registers at a name server: its listing in, decisions and waits out. Pure.

A name server accepts every registration. An id used twice silently replaces the other broker's address, id 0 takes over
as master, a wrong cluster name lists the broker twice. Liveness is kept by address alone (4.9) or by cluster and
address (5.x): registering the address of a broker of another name takes over that broker's entry, and closing the
connection then removes the first name that has the address. So each registration is preceded by a read of the whole
listing and counts only once the listing shows it.

In clusters where slaves act as masters or a controller elects them, every registered member takes part in the master's
start, so slave mode, which is no replica, does not join them.

Sources: RouteInfoManager.registerBroker, unregisterBroker, onChannelDestroy; DefaultRequestProcessor.registerBroker;
BrokerController.startProcessorByHa, BrokerPreOnlineService; BrokerOuterAPI.registerBrokerAll.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from tiered.errors import CorruptionError
from tiered.formats import fastjson
from tiered.remoting.command import RemotingCommand, RequestCode
from tiered.remoting.tls import ClientTls

MASTER_ID: Final = 0
AGAIN_S: Final = 10.0
"""Time to the second registration, as brokers do: the first may come while the name server starts."""
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 5.0
_MASK: Final = 0x7FFFFFFF


@dataclass(frozen=True)
class SlaveConfig:
    """The master, its name servers, and the registration: ``broker_id`` at the address ``advertise`` that clients dial.
    ``broker_address``: empty without a master. ``tls``: for the connections to broker and name servers; None: plain."""

    broker: str
    broker_address: str
    name_servers: tuple[str, ...]
    advertise: str
    broker_id: int
    tls: ClientTls | None = None


@dataclass(frozen=True)
class Listing:
    """A name server's entries for the broker's name: ``addresses`` by id, empty if the name is not listed. ``others``:
    address -> id and name of another broker that has it, in any cluster."""

    addresses: Mapping[int, str] = field(default_factory=dict)
    cluster: str = ""
    zone: str = ""
    is_acting: bool = False
    """Slaves of this broker may act as its master."""
    others: Mapping[str, str] = field(default_factory=dict)


def parse_listing(body: bytes, broker: str) -> Listing:
    """Return what a name server's reply to GET_BROKER_CLUSTER_INFO has for ``broker``, and the addresses of all others.
    Raises CorruptionError if the reply does not parse."""
    document = fastjson.loads(body) if body else {}
    try:
        table = (document or {}).get("brokerAddrTable") or {}
        others = {
            str(address): f"id {number} of {name}"
            for name, data in table.items()
            if name != broker
            for number, address in ((data or {}).get("brokerAddrs") or {}).items()
        }
        data = table.get(broker)
        if data is None:
            return Listing(others=others)
        addresses = {int(number): str(address) for number, address in (data.get("brokerAddrs") or {}).items()}
        cluster, zone = str(data.get("cluster") or ""), str(data.get("zoneName") or "")
        return Listing(addresses, cluster, zone, data.get("enableActingMaster") is True, others)
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"the name server's list of brokers has an unexpected form: {error!r}"
        ) from error


def listing_refusal(listed: Listing, slave: SlaveConfig, *, was_registered: bool) -> str | None:
    """Return why this process is not to register at a name server that lists the broker like this, None if it is.

    ``was_registered``: this process has been registered with this master before. Then the master need not be listed: a
    name server that has just started lists no broker yet.
    """
    if listed.is_acting:
        return "slaves of this broker may act as master (enableSlaveActingMaster): slave mode cannot join"
    if (why := address_refusal(listed, slave)) is not None:
        return why
    holder = listed.addresses.get(slave.broker_id)
    if holder is not None and holder != slave.advertise:
        return f"id {slave.broker_id} of {slave.broker} belongs to {holder}: set slave.broker_id to a free id"
    for number, address in listed.addresses.items():
        if address == slave.advertise and number != slave.broker_id:
            # Registering an address removes it from every other id, the master's included.
            return f"{address} is listed as id {number} of {slave.broker}: slave.advertise must be this process's own"
    highest = max(listed.addresses, default=0)
    if holder is None and highest > slave.broker_id:
        return f"{slave.broker} has a slave with id {highest}: slave.broker_id must be larger than any real slave's"
    if MASTER_ID not in listed.addresses and not was_registered:
        return f"the name server lists no master of {slave.broker}"
    return None


def address_refusal(listed: Listing, slave: SlaveConfig) -> str | None:
    """Why not to register ``slave.advertise``: a broker of another name has it. None: it is free."""
    other = listed.others.get(slave.advertise)
    if other is None:
        return None
    return f"{slave.advertise} is listed as {other}: slave.advertise must be this process's own"


@dataclass(frozen=True)
class Claims:
    """Conflicts in one name server's listing: ``holder``, another address with our id, and ``namesake``, another broker
    with our address."""

    holder: str | None = None
    namesake: str | None = None


def claims_in(listed: Listing, slave: SlaveConfig) -> Claims:
    """The conflicts in this listing."""
    holder = listed.addresses.get(slave.broker_id)
    return Claims(holder if holder != slave.advertise else None, listed.others.get(slave.advertise))


def claims_refusal(listed: Listing, slave: SlaveConfig, elsewhere: Iterable[Claims]) -> str | None:
    """Return why not to register at a name server whose listing has no conflict, as others (``elsewhere``) have one and
    this server may have just started; None: there is none."""
    claims = tuple(elsewhere)
    holder = next((claim.holder for claim in claims if claim.holder is not None), None)
    if holder is not None and slave.broker_id not in listed.addresses:
        return f"id {slave.broker_id} belongs to {holder} at another name server"
    namesake = next((claim.namesake for claim in claims if claim.namesake is not None), None)
    return f"{slave.advertise} is {namesake} at another name server" if namesake is not None else None


def new_master_refusal(listed: Listing, known: str | None, *, is_master_available: bool) -> str | None:
    """Return why the listed master is not the one beside this process, None if it is or that is not known. ``known``:
    the address of the master beside this process, as it was listed while that answered.

    Readers past the archive's end would wait here for a master that is gone, while the new one has their messages.
    """
    present = listed.addresses.get(MASTER_ID)
    if is_master_available or known is None or present in (None, known):
        return None
    return f"{present} is the master now; {known}, the master of this sidecar, does not answer"


def master_refusal(config: Mapping[str, str], broker: str) -> str | None:
    """Return why the master's configuration ``config`` rules out slave mode for ``broker``, None if it does not: the
    broker is another one, no master, or in a cluster whose slaves may become masters."""
    if (name := config.get("brokerName", "").strip() or broker) != broker:
        return f"the broker at broker.address is {name}, not {broker}"
    for name, what in (
        ("enableSlaveActingMaster", "slaves act as master"),
        ("enableControllerMode", "a controller elects masters"),
        ("enableDLegerCommitLog", "DLedger elects masters"),
    ):
        if config.get(name, "").strip().lower() == "true":
            return f"{what} in this cluster ({name}): slave mode cannot join it"
    if config.get("brokerRole", "").strip().upper() == "SLAVE":
        return "the broker at broker.address is a slave: slave mode runs beside the master"
    return None


def register_command(
    slave: SlaveConfig, listed: Listing, topics: Mapping[str, object] | None = None, version: int = 0
) -> RemotingCommand:
    """Return the request REGISTER_BROKER for ``slave``, which a name server in the cluster of ``listed`` gets. A slave
    registers no ``topics``, as its master does. ``version``: that of the topics; 0 is older than any broker's, so that
    it replaces none."""
    data_version = {"counter": version, "stateVersion": 0, "timestamp": version}
    wrapper = {
        "dataVersion": data_version,
        "mappingDataVersion": data_version,
        "topicConfigTable": topics or {},
        "topicQueueMappingDetailMap": {},
        "topicQueueMappingInfoMap": {},
    }
    document = {"filterServerList": [], "topicConfigSerializeWrapper": wrapper}
    body = json.dumps(document, separators=(",", ":")).encode()
    host, _, port = slave.advertise.rpartition(":")
    fields = {
        **_identity(slave, listed.cluster),
        "haServerAddr": f"{host}:{int(port) + 1 if int(port) < 65_535 else port}",
        "bodyCrc32": str(zlib.crc32(body) & _MASK),
        "compressed": "false",
    }
    if listed.zone:
        fields["__ZONE_NAME"] = listed.zone  # the last registration names the zone of all
    return RemotingCommand(RequestCode.REGISTER_BROKER, 0, ext_fields=fields, body=body)


def unregister_command(slave: SlaveConfig, listed: Listing) -> RemotingCommand | None:
    """Return the request UNREGISTER_BROKER for ``slave``; None unless the name server lists its id at its address: 4.9
    removes the id whatever its address.

    Also sent when a broker of another name has our address by now. That broker loses its liveness entry until it
    registers again (30 s), but no route. Closing the connection without it may remove that broker's route.
    """
    if listed.addresses.get(slave.broker_id) != slave.advertise:
        return None
    return RemotingCommand(RequestCode.UNREGISTER_BROKER, 0, ext_fields=_identity(slave, listed.cluster))


def _identity(slave: SlaveConfig, cluster: str) -> dict[str, str]:
    return {
        "brokerName": slave.broker,
        "brokerAddr": slave.advertise,
        "clusterName": cluster,
        "brokerId": str(slave.broker_id),
    }


class RegistrationState(Enum):
    """The registration at one name server."""

    NOT_YET = "not yet registered"
    REGISTERED = "registered"
    REFUSED = "not registered"
    UNREACHABLE = "not reachable"
    LEFT = "unregistered"


@dataclass(frozen=True)
class RegistrationProgress:
    """Progress at one name server. ``rounds``: registrations on this connection; ``failures``: in a row."""

    state: RegistrationState = RegistrationState.NOT_YET
    why: str = ""
    rounds: int = 0
    failures: int = 0

    def __str__(self) -> str:
        return f"{self.state.value}: {self.why}" if self.why else self.state.value

    def registered(self) -> RegistrationProgress:
        """The name server lists this process."""
        return RegistrationProgress(RegistrationState.REGISTERED, "", self.rounds + 1, 0)

    def refused(self, why: str) -> RegistrationProgress:
        """Registration is not possible now."""
        return RegistrationProgress(RegistrationState.REFUSED, why)

    def failed(self, why: str) -> RegistrationProgress:
        """No reply, or the connection is lost and the registration with it."""
        return RegistrationProgress(RegistrationState.UNREACHABLE, why, 0, self.failures + 1)

    def left(self) -> RegistrationProgress:
        """Unregistered at the end."""
        return replace(self, state=RegistrationState.LEFT, rounds=0)


def wait_s(progress: RegistrationProgress, period_s: float) -> float:
    """How long until the next round."""
    if progress.state is RegistrationState.UNREACHABLE:
        return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(10, progress.failures - 1))
    if progress.state is RegistrationState.REGISTERED and progress.rounds > 1:
        return period_s
    return min(AGAIN_S, period_s)
