"""Which requests proxy mode has the broker judge before it relays them."""

from __future__ import annotations

from rocketmq_tiered.server.proxy.accepted_accounts import JUDGED
from rocketmq_tiered.server.security.permissions import ADMIN, NEEDS
from rocketmq_tiered.server.wire.codes import RequestCode

JUDGED_BY_BROKERS = {
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.DELETE_SUBSCRIPTIONGROUP,
}
"""By 4.9.7 with ACL 1.0 and 5.3.3 with ACL 5.x alike."""
ROUTES = {RequestCode.GET_BROKER_CLUSTER_INFO}


def test_everything_that_needs_an_administrator_is_judged() -> None:
    """Brokers with ACL 1.0 return the offsets of all groups to every account: relayed unjudged, so does proxy mode."""
    administrative = {code for code, need in NEEDS.items() if need.acl_1 is ADMIN}
    assert administrative - JUDGED == JUDGED_BY_BROKERS | ROUTES
