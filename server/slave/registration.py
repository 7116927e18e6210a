"""Whether, as what and when to register at a name server. Pure: what it lists in, verdicts and waits out.

A name server believes whoever registers: an id used twice silently replaces the other broker's address, id 0 takes over
as master, a wrong cluster name lists the broker twice. It knows who lives by address alone (4.9) or by cluster and
address (5.x), whatever the name: who registers the address of a broker of another name takes over that broker's entry,
and when he hangs up, the first of the names that have the address is taken off the list. So every registration follows
a look at all that is listed, and is believed only when it is seen there.

In clusters where slaves act as masters, or where a controller elects them, every registered member takes part in the
master's start: such a cluster has no place for somebody who is no replica.

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
from tiered.remoting.command import RemotingCommand
from tiered.remoting.tls import ClientTls

REGISTER_BROKER: Final = 103
UNREGISTER_BROKER: Final = 104
GET_BROKER_CLUSTER_INFO: Final = 106
MASTER_ID: Final = 0
AGAIN_S: Final = 10.0
"""Brokers register a second time so soon, in case the first came while the name server started."""
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 5.0
_MASK: Final = 0x7FFFFFFF
_NO_VERSION: Final = {"counter": 0, "stateVersion": 0, "timestamp": 0}
"""Older than anybody's: nobody takes anything from us for newer than his own."""
_BODY: Final = json.dumps(
    {
        "filterServerList": [],
        "topicConfigSerializeWrapper": {
            "dataVersion": _NO_VERSION,
            "mappingDataVersion": _NO_VERSION,
            "topicConfigTable": {},
            "topicQueueMappingDetailMap": {},
            "topicQueueMappingInfoMap": {},
        },
    },
    separators=(",", ":"),
).encode()
"""No topics at all: the master tells those. (One topic alone is refused by 5.x.)"""


@dataclass(frozen=True)
class SlaveConfig:
    """Whose slave it is and as what: ``broker_id`` at the address ``advertise`` that clients dial. ``tls``: how the
    broker and the name servers are dialled; None: plain."""

    broker: str
    broker_address: str
    name_servers: tuple[str, ...]
    advertise: str
    broker_id: int
    tls: ClientTls | None = None


@dataclass(frozen=True)
class Listing:
    """What a name server lists of the broker's name. ``addresses`` by id; empty: it does not know the name.
    ``others``: by address, which id of which other name has it, in any cluster."""

    addresses: Mapping[int, str] = field(default_factory=dict)
    cluster: str = ""
    zone: str = ""
    is_acting: bool = False
    """A slave of it may act as its master."""
    others: Mapping[str, str] = field(default_factory=dict)


def listed_in(body: bytes, broker: str) -> Listing:
    """What a GET_BROKER_CLUSTER_INFO answer says, for ``broker``. Raises CorruptionError for what does not parse."""
    document = fastjson.loads(body) if body else {}
    try:
        table = (document or {}).get("brokerAddrTable") or {}
        others = {
            str(address): f"id {number} of {name}"
            for name, data in table.items() if name != broker
            for number, address in ((data or {}).get("brokerAddrs") or {}).items()
        }  # fmt: skip
        data = table.get(broker)
        if data is None:
            return Listing(others=others)
        addresses = {int(number): str(address) for number, address in (data.get("brokerAddrs") or {}).items()}
        cluster, zone = str(data.get("cluster") or ""), str(data.get("zoneName") or "")
        return Listing(addresses, cluster, zone, data.get("enableActingMaster") is True, others)
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptionError(f"the cluster information does not parse: {error}") from error


def refusal_of_place(listed: Listing, place: SlaveConfig, *, was_registered: bool) -> str | None:
    """Why not to register at a name server that lists this, or None.

    ``was_registered``: somewhere, by this process, behind this master. Then the master need not be listed: a name
    server that has just started knows nobody yet.
    """
    if listed.is_acting:
        return (
            "slaves of this broker may act as master (enableSlaveActingMaster): slave mode cannot join them"
        )
    if (why := refusal_of_address(listed, place)) is not None:
        return why
    holder = listed.addresses.get(place.broker_id)
    if holder is not None and holder != place.advertise:
        return f"id {place.broker_id} of {place.broker} belongs to {holder}: set slave.broker_id to one that is free"
    for number, address in listed.addresses.items():
        if address == place.advertise and number != place.broker_id:
            # Registering an address takes it from every other id, the master's too.
            return (
                f"{address} is listed as id {number} of {place.broker}: slave.advertise must be our own alone"
            )
    highest = max(listed.addresses, default=0)
    if holder is None and highest > place.broker_id:
        return f"{place.broker} has a slave with id {highest}: slave.broker_id must be larger than every real slave's"
    if MASTER_ID not in listed.addresses and not was_registered:
        return f"the name server lists no master of {place.broker}"
    return None


def refusal_of_address(listed: Listing, place: SlaveConfig) -> str | None:
    """Why our address is not ours to register: a broker of another name has it. None: none has."""
    other = listed.others.get(place.advertise)
    if other is None:
        return None
    return f"{place.advertise} is listed as {other}: slave.advertise must be our own alone"


@dataclass(frozen=True)
class Claims:
    """What one name server lists as somebody else's: ``holder``, the address that has our id, and ``namesake``, who has
    our address under another name."""

    holder: str | None = None
    namesake: str | None = None


def claims_in(listed: Listing, place: SlaveConfig) -> Claims:
    """The claims of a name server that lists this."""
    holder = listed.addresses.get(place.broker_id)
    return Claims(holder if holder != place.advertise else None, listed.others.get(place.advertise))


def refusal_of_claims(listed: Listing, place: SlaveConfig, elsewhere: Iterable[Claims]) -> str | None:
    """Why not to register at a name server that lists nobody in our place, or None: ``elsewhere`` somebody is listed
    there, who is only on the way to a name server that has just started."""
    claims = tuple(elsewhere)
    holder = next((claim.holder for claim in claims if claim.holder is not None), None)
    if holder is not None and place.broker_id not in listed.addresses:
        return f"id {place.broker_id} belongs to {holder} at another name server"
    namesake = next((claim.namesake for claim in claims if claim.namesake is not None), None)
    return f"{place.advertise} is {namesake} at another name server" if namesake is not None else None


def refusal_of_another_master(listed: Listing, known: str | None, *, is_master_well: bool) -> str | None:
    """Why the master listed is not the one beside us, or None. ``known``: as it was listed while that one answered.

    Readers behind the archive's end would wait here for a master that is gone, while the new one has their messages.
    """
    now = listed.addresses.get(MASTER_ID)
    if is_master_well or known is None or now in (None, known):
        return None
    return f"{now} is the master now: {known}, the one beside us, does not answer"


def refusal_of_master(config: Mapping[str, str], broker: str) -> str | None:
    """Why the configuration of the master of ``broker`` leaves no place for us, or None."""
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
        return "the broker beside us is a slave itself: slave mode works beside the master"
    return None


def register_command(place: SlaveConfig, listed: Listing) -> RemotingCommand:
    """REGISTER_BROKER, as a slave without topics of its own; enableActingMaster is left out on purpose."""
    host, _, port = place.advertise.rpartition(":")
    fields = {
        **_identity(place, listed.cluster),
        "haServerAddr": f"{host}:{int(port) + 1 if int(port) < 65_535 else port}",
        "bodyCrc32": str(zlib.crc32(_BODY) & _MASK),
        "compressed": "false",
    }
    if listed.zone:
        fields["__ZONE_NAME"] = listed.zone  # the last one to register names the zone of all
    return RemotingCommand(REGISTER_BROKER, 0, ext_fields=fields, body=_BODY)


def unregister_command(place: SlaveConfig, listed: Listing) -> RemotingCommand | None:
    """UNREGISTER_BROKER; None unless the id is ours: 4.9 removes whoever has it.

    Sent also where a broker of another name has our address by now. It loses its entry among the living to this, until
    it registers again (30 s), but no route; who hangs up without it may take that broker's route away.
    """
    if listed.addresses.get(place.broker_id) != place.advertise:
        return None
    return RemotingCommand(UNREGISTER_BROKER, 0, ext_fields=_identity(place, listed.cluster))


def _identity(place: SlaveConfig, cluster: str) -> dict[str, str]:
    return {
        "brokerName": place.broker,
        "brokerAddr": place.advertise,
        "clusterName": cluster,
        "brokerId": str(place.broker_id),
    }


class RegistrationState(Enum):
    """Where we are with one name server."""

    NOT_YET = "not yet registered"
    REGISTERED = "registered"
    REFUSED = "not registered"
    UNREACHABLE = "not reachable"
    LEFT = "unregistered"


@dataclass(frozen=True)
class Progress:
    """One name server's story. ``rounds``: registrations since the connection was made; ``failures`` in a row."""

    stand: RegistrationState = RegistrationState.NOT_YET
    why: str = ""
    rounds: int = 0
    failures: int = 0

    def registered(self) -> Progress:
        """It lists us."""
        return Progress(RegistrationState.REGISTERED, "", self.rounds + 1, 0)

    def refused(self, why: str) -> Progress:
        """There is no place for us now."""
        return Progress(RegistrationState.REFUSED, why)

    def failed(self, why: str) -> Progress:
        """No answer, or the connection is lost: with it what was registered by it."""
        return Progress(RegistrationState.UNREACHABLE, why, 0, self.failures + 1)

    def left(self) -> Progress:
        """Unregistered for good."""
        return replace(self, stand=RegistrationState.LEFT, rounds=0)


def wait_s(progress: Progress, period_s: float) -> float:
    """How long until the next round."""
    if progress.stand is RegistrationState.UNREACHABLE:
        return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(10, progress.failures - 1))
    if progress.stand is RegistrationState.REGISTERED and progress.rounds > 1:
        return period_s
    return min(AGAIN_S, period_s)
