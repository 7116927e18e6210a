"""Lets requests in or refuses them, by rules from a file, and keeps the audit log. Implements connection.Authorizer.

Without rules everything is let in. A refusal is NO_PERMISSION, which clients of all versions report and try again.
A 4.9 client takes any refusal of QUERY_CONSUMER_OFFSET for "never read here" and would begin elsewhere: it gets none.

A message that is named by its place in the log (33, 36) is one of any topic: its own is asked for when it is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from server.security.addresses import host_of, matches
from server.security.audit import Audit
from server.security.rules_file import RulesFile
from server.security.signature import is_signed
from server.wire.codes import RequestCode, ResponseCode
from server.wire.request import Request, Response
from tiered.formats.record import decode_record
from tiered.remoting.credentials import ACCESS_KEY, SIGNATURE

FIRST_5 = 413
"""MQVersion of 5.0.0."""


class RulesAuthorizer:
    """``rules`` None: everybody may do everything. ``now_s`` is monotonic."""

    def __init__(
        self, rules: RulesFile | None, audit_interval_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules, self._now_s = rules, now_s
        self._audit = Audit(audit_interval_s, now_s())
        self.refused = 0

    def refusal(self, request: Request) -> Response | None:
        """See Authorizer. Raises BadRequestError."""
        if self._rules is None:
            return None
        self._rules.look(self._now_s())
        why = self._why_not(request)
        if why is None:
            return None
        self.refused += 1
        command = request.command
        is_silent = command.code == RequestCode.QUERY_CONSUMER_OFFSET and command.version < FIRST_5
        return Response(ResponseCode.NO_PERMISSION, remark=why, is_withheld=is_silent)

    def _why_not(self, request: Request) -> str | None:
        assert self._rules is not None
        rules, command = self._rules.rules, request.command
        host = host_of(request.peer.address)
        if rules.trusts(host):
            return None
        name = command.ext_fields.get(ACCESS_KEY)
        account = None if name is None else rules.accounts.get(name)
        if account is not None and account.trusted_from and matches(account.trusted_from, host):
            return None
        if name is None or SIGNATURE not in command.ext_fields:
            return "the request is not signed"
        # One text for both, and as much work: who guesses names learns nothing.
        secret = "" if account is None else account.secret
        is_right = is_signed(command.ext_fields, command.body, secret)
        if account is None or not is_right:
            return f"access key {name[:64]} is unknown, or the signature is not its"
        if not account.is_enabled:
            return f"{name[:64]} is disabled"
        return rules.forbids(account, request, host)

    def refusal_of_message(self, request: Request, topic: str) -> Response | None:
        """What to answer a request that was let in, and names a message of ``topic`` by its place; None: serve it."""
        if self._rules is None:
            return None
        rules, host = self._rules.rules, host_of(request.peer.address)
        account = rules.accounts.get(request.command.ext_fields.get(ACCESS_KEY, ""))
        if rules.trusts(host) or (
            account is not None and account.trusted_from and matches(account.trusted_from, host)
        ):
            return None
        # None: the rules were read anew since it was let in.
        why = "its account is gone" if account is None else rules.forbids_message(account, topic, host)
        if why is None:
            return None
        self.refused += 1
        return Response(ResponseCode.NO_PERMISSION, remark=why)

    def filtered(self, request: Request, response: Response) -> Response:
        """See Authorizer. Raises CorruptionError."""
        if self._rules is None or request.command.code != RequestCode.VIEW_MESSAGE_BY_ID or not response.body:
            return response
        topic = decode_record(b"".join(response.body)).topic
        return self.refusal_of_message(request, topic) or response

    def note(self, request: Request, response: Response, body_bytes: int) -> None:
        """See Authorizer."""
        account = request.command.ext_fields.get(ACCESS_KEY, "") if self._rules is not None else ""
        self._audit.note(request, response, body_bytes, account)

    def tick(self, now_s: float) -> None:
        """See Authorizer."""
        self._audit.tick(now_s)

    def close(self) -> None:
        """See Authorizer."""
        self._audit.write()
