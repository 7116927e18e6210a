"""Authorizes requests by rules from a file, and keeps the audit log. Without rules all requests are allowed.

A refusal is NO_PERMISSION, which clients of all versions report and retry. A 4.9 client reads any refusal of
QUERY_CONSUMER_OFFSET as "no offset yet" and would start elsewhere, so it gets no reply.

A request for a message by physical offset (33, 36, 37) is authorized for the message's own topic once that is known.
"""

import hmac
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final

from rocketmq_tiered.server.security.addresses import host_of
from rocketmq_tiered.server.security.audit import Audit, AuditEvents
from rocketmq_tiered.server.security.permissions import NEEDS, encoded_body
from rocketmq_tiered.server.security.rules import Rules, rules_in_file
from rocketmq_tiered.server.wire.request import BadRequestError, Request, Response
from rocketmq_tiered.server.wire.request_fields import undeclared
from tiered.archive.private_key import private_key
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import CorruptionError
from tiered.formats.record import Record, decode_record
from tiered.model.timer import TOPIC, sender_of
from tiered.model.topic_names import shortened
from tiered.object_store.interface import ObjectStore
from tiered.reloaded_files import ReloadedFiles
from tiered.remoting.command import RequestCode, ResponseCode, request_name
from tiered.remoting.credentials import ACCESS_KEY, SIGNATURE, signature_of

_UNIQUE_KEY_QUERY = "_UNIQUE_KEY_QUERY"


def is_signed(fields: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Return whether a request with these fields and this body carries the signature that ``secret`` makes. The
    comparison takes the same time for every wrong signature."""
    given = fields.get(SIGNATURE, "").encode()
    if hmac.compare_digest(signature_of(fields, body, secret).encode(), given):
        return True
    if _UNIQUE_KEY_QUERY not in fields:
        return False
    # Clients before 4.9.4 add this field after signing.
    signed = {name: value for name, value in fields.items() if name != _UNIQUE_KEY_QUERY}
    return hmac.compare_digest(signature_of(signed, body, secret).encode(), given)


FIRST_5 = 413
"""MQVersion of 5.0.0."""


class RulesAuthorizer:
    """Judges requests by the rules of a file; without ``rules`` everything is allowed. A
    request that is allowed has the body that the rules have seen, encoded again, unless ``keeps_bodies``: its
    signature is checked again."""

    def __init__(
        self,
        rules: ReloadedFiles[Rules] | None,
        audit_interval_s: float,
        clock: Clock = MACHINE_CLOCK,
        events: AuditEvents | None = None,
        *,
        keeps_bodies: bool = False,
    ) -> None:
        """``rules``: None allows every request; ``audit_interval_s``: between lines of the audit log, 0 for none;
        ``events``: the log of events that the server shares, or one of its own; ``keeps_bodies``: a request keeps the
        body that it came with, as another server checks its signature."""
        self._rules, self._clock, self._keeps_bodies = rules, clock, keeps_bodies
        self._audit = Audit(audit_interval_s, clock.monotonic_s())
        self._events = events or AuditEvents(clock=clock)
        self.audited, self.is_outside, self.record = (
            self._events.counts,
            self._events.is_outside,
            self._events.record,
        )

    def refusal(self, request: Request) -> Response | None:
        """Return the reply to a request that the rules do not allow, None if they do. Raises BadRequestError for a body
        that does not parse."""
        if self._rules is None:
            return None
        why = self._why_not(self._rules.now(), request)
        if why is None:
            return None
        command = request.command
        # A client of 4.9 takes any refusal for "no offset yet", and would start elsewhere.
        is_silent = command.code == RequestCode.QUERY_CONSUMER_OFFSET and command.version < FIRST_5
        return Response(ResponseCode.NO_PERMISSION, remark=why, is_withheld=is_silent)

    def _why_not(self, rules: Rules, request: Request) -> str | None:
        """Return why a request is refused, None if it is allowed: first by its address, then by the account whose
        signature it carries, and at last by the rules for that account."""
        command = request.command
        host = host_of(request.peer.address)
        if rules.is_trusted(host):
            return None
        name = command.ext_fields.get(ACCESS_KEY)
        account = None if name is None else rules.accounts.get(name)
        if account is not None and account.is_trusted(host):
            request.account = account.name
            return None
        if name is None or SIGNATURE not in command.ext_fields:
            return "the request is not signed"
        # The same text and the same work for both, so that guesses reveal no names.
        secret = "" if account is None else account.secret
        is_right = is_signed(command.ext_fields, command.body, secret)
        if account is None or not is_right:
            return f"access key {name[:64]} is unknown or its signature is wrong"
        if not account.is_enabled:
            return f"account {name[:64]} is disabled"
        if (field := undeclared(command)) is not None:
            raise BadRequestError(
                f"request {request_name(command.code)} has the unknown field {shortened(field)}"
            )
        why = rules.refusal(account, request, host)
        # The handler and the broker get the body that the rules have judged, and nothing else.
        if why is None and command.body and command.code in NEEDS:
            body = encoded_body(request)
            if not self._keeps_bodies:
                request.command = replace(command, body=body)
        request.account = account.name
        return why

    def refusal_of_record(self, request: Request, data: bytes, phys: int) -> Response | None:
        """Return the refusal of a request that names a message by its physical offset ``phys``, None if it is allowed.
        Only the message's bytes ``data`` say which topic has to be readable for the account."""
        if self._rules is None:
            return None
        rules, host = self._rules.now(), host_of(request.peer.address)
        account = rules.accounts.get(request.command.ext_fields.get(ACCESS_KEY, ""))
        if rules.is_trusted(host) or (account is not None and account.is_trusted(host)):
            return None
        # No account: the rules were reloaded after the request was authorized.
        why: str | None = "the account no longer exists"
        if account is not None:
            record = record_at(data, phys)
            why = f"no message begins at physical offset {phys}"
            if record is not None:
                why = rules.record_refusal(account, request, record, host)
        if why is None:
            return None
        return Response(ResponseCode.NO_PERMISSION, remark=why)

    def filtered(self, request: Request, response: Response) -> Response:
        """Return ``response``, or a refusal if it holds a message that the client's account may not read. Raises
        BadRequestError."""
        if self._rules is None or request.command.code != RequestCode.VIEW_MESSAGE_BY_ID or not response.body:
            return response
        data = b"".join(response.body)
        return self.refusal_of_record(request, data, request.number("offset")) or response

    def note(self, request: Request, response: Response, body_bytes: int) -> None:
        account = request.command.ext_fields.get(ACCESS_KEY, "") if self._rules is not None else ""
        self._audit.note(request, response, body_bytes, account)

    def tick(self, now_s: float) -> None:
        self._audit.tick(now_s)
        self._events.tick(now_s)

    def close(self) -> None:
        self._audit.write()
        self._events.write()


def record_at(data: bytes, phys: int) -> Record | None:
    """Return the record in ``data`` if it is whole and lies at physical offset ``phys``; else None: a client may name
    an offset inside a message, whose body may look like a record."""
    try:
        record = decode_record(data)
    except CorruptionError:
        return None
    is_whole = zlib.crc32(record.stored_body) & 0x7FFF_FFFF == record.body_crc
    return record if is_whole and record.physical_offset == phys else None


ANONYMOUS: Final = "anonymous"
"""The account, if the rules have it, of what was sent to the gateway topic itself, or before there were rules."""


def hand_over_refusal(rules: Rules, key: bytes, properties: Mapping[str, str], body: bytes) -> str | None:
    """Why the message of the gateway topic may not be sent to its own topic; None: it may. Pure. ``key``: the
    archive's private key."""
    name, _, host = (sender_of(key, properties, body) or f"{ANONYMOUS}@").rpartition("@")
    return rules.send_refusal(name or ANONYMOUS, properties.get(TOPIC, ""), host)


def sender_rights(acl_file: Path, store: ObjectStore) -> Callable[[Mapping[str, str], bytes], str | None]:
    """A function that says why the sender of a message of the gateway topic may not send to its own topic, or None: by
    the rules in force in a file, and the archive's key in ``store``; it raises what the store raises. Raises UsageError
    if the file is invalid at the start."""
    rules, key = rules_in_file(acl_file), cache(partial(private_key, store))
    return lambda properties, body: hand_over_refusal(rules.now(), key(), properties, body)
