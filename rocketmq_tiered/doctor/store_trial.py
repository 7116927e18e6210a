"""Tries what an archive requires of its object store, on objects below `doctor/` that are removed at the end.

Owns these objects. The catalog is never touched. Permissions are tried one by one: each check needs one more.
"""

from contextlib import suppress
from dataclasses import replace

from rocketmq_tiered.doctor.check import (
    Check,
    CheckFinding,
    PolicyLines,
    denied_action,
    failed,
    failed_by,
    ok,
)
from rocketmq_tiered.maintenance.gc import CLOCK_SKEW_MS_MAX
from tiered.clock import Clock
from tiered.errors import AlreadyExistsError, NotFoundError, TieredError
from tiered.object_store.bucket_probe import BucketProbe
from tiered.object_store.create_race import RACERS, ROUNDS, TRIAL_SUFFIX, new_trial, race_creates
from tiered.object_store.interface import ObjectRange, ObjectStore

PART_BYTES = 5 * 1024 * 1024
"""The smallest part that S3 accepts."""
PIECE_BYTES = 1024 * 1024
_CONTENT = b"written by tiered doctor; may be deleted"
_USE_ANOTHER = "use a store that implements S3 completely, such as AWS S3 or MinIO"


class StoreTrial:
    """One trial of ``store``. ``probe`` is None where there is no bucket; ``policy`` names missing permissions.
    ``largest_put_bytes``: of an object that is not sent in parts."""

    def __init__(
        self,
        store: ObjectStore,
        probe: BucketProbe | None,
        policy: PolicyLines | None,
        *,
        clock: Clock,
        largest_put_bytes: int = PART_BYTES,
    ) -> None:
        """``clock``: this host's clock, which a check compares with the store's."""
        self._store, self._probe, self._policy = store, probe, policy
        self._host_clock = clock
        self._largest_put_bytes = largest_put_bytes
        self.prefix = new_trial()
        self._left: dict[str, None] = {}
        """Keys that may exist."""

    def checks(self) -> list[Check]:
        """The checks of the object store, in order. The last one, of deletion, removes the objects that the others
        wrote."""
        every = [
            Check("bucket", "object store answers", self._reached),
            Check("bucket-list", "list", self._list, ("bucket",)),
            Check("bucket-create", "create", self._create, ("bucket",)),
            Check("bucket-clock", "clock of the object store", self._clock, ("bucket-list", "bucket-create")),
            Check(
                "bucket-create-again",
                "a second create of a key is refused",
                self._create_again,
                ("bucket-create",),
            ),
            Check(
                "bucket-create-race",
                "one of many simultaneous creates wins",
                self._race,
                ("bucket-create-again",),
            ),
            Check("bucket-read", "read", self._read, ("bucket-create",)),
            Check("bucket-range", "read ranges", self._range, ("bucket-read",)),
            Check(
                "bucket-order", "lists are complete and sorted", self._order, ("bucket-create", "bucket-list")
            ),
            Check(
                "bucket-multipart", "upload of a large object in parts", self._multipart, ("bucket-create",)
            ),
            Check(
                "bucket-copy-part",
                "copy of a range of an object into a multipart upload (UploadPartCopy)",
                self._copy,
                ("bucket-multipart", "bucket-read"),
            ),
        ]
        if self._probe is not None:
            every += [
                Check("bucket-large", "the largest request", self._large, ("bucket-create",)),
                Check("bucket-multipart-abort", "abort an upload", self._abort, ("bucket-create",)),
                Check(
                    "bucket-checksum",
                    "an upload whose bytes do not match its checksum is refused",
                    self._checksum,
                    ("bucket-create",),
                ),
            ]
        return [*every, Check("bucket-delete", "delete", self._delete, ("bucket-create",))]

    def remove(self) -> None:
        """Remove what the trial left, as far as allowed: for a trial that was interrupted."""
        with suppress(TieredError):
            self._store.delete(list(self._left))
            self._left.clear()

    def _key(self, name: str) -> str:
        key = f"{self.prefix}{name}{TRIAL_SUFFIX}"
        self._left[key] = None
        return key

    def _reached(self) -> CheckFinding:
        """Whether the store answers at all. An answer that denies access is one: later checks say what is denied."""
        try:
            next(self._store.list(self.prefix, limit=1), None)
        except TieredError as error:
            if denied_action(error):
                return ok(self._store.url)
            finding = failed_by(error)
            return replace(
                finding, fix=error.hint or "check object_store.endpoint_url, and the network to that address"
            )
        return ok(self._store.url)

    def _list(self) -> CheckFinding:
        """Whether this account may list objects."""
        if any(self._store.list(self.prefix, limit=1)):
            return failed("a list of a prefix that was never used has objects", _USE_ANOTHER)
        return ok(f"below {self._store.url}")

    def _clock(self) -> CheckFinding:
        skew_ms = self._host_clock.wall_ms() - self._store.clock_ms(self.prefix)
        text = f"this host's clock is {abs(skew_ms) / 1000:.1f} s {'ahead' if skew_ms > 0 else 'behind'}"
        if abs(skew_ms) > CLOCK_SKEW_MS_MAX:
            return failed(text, "set this host's clock: garbage collection refuses to run until then")
        return ok(text)

    def _create(self) -> CheckFinding:
        self._store.put_if_absent(self._key("small"), [_CONTENT])
        return ok(f"{self._store.url}/{self.prefix}")

    def _create_again(self) -> CheckFinding:
        """Whether a conditional write is refused if the object exists: commits to the archive rely on it."""
        try:
            self._store.put_if_absent(self._key("small"), [_CONTENT])
        except AlreadyExistsError:
            return ok("an existing object is not replaced")
        return failed(
            "a second create of the same key succeeded: two writers would replace each other's commits",
            "use a store with conditional PUTs (If-None-Match: *), such as AWS S3 or MinIO",
        )

    def _race(self) -> CheckFinding:
        for number in range(ROUNDS):
            race_creates(self._store, self._key(f"race-{number}"))
        return ok(f"one of {RACERS} creates succeeded, in each of {ROUNDS} rounds")

    def _read(self) -> CheckFinding:
        if self._store.get(self._key("small"), PART_BYTES) != _CONTENT:
            return failed("an object has other bytes than were written", _USE_ANOTHER)
        return ok("the object has the bytes that were written")

    def _range(self) -> CheckFinding:
        if self._store.get_range(self._key("small"), 8, 5) != _CONTENT[8:13]:
            return failed(
                "a range read returns other bytes than were requested",
                f"{_USE_ANOTHER}; a proxy before the store may ignore the header Range",
            )
        return ok("from an offset")

    def _order(self) -> CheckFinding:
        """Whether a list has all objects directly after they were written, sorted by the bytes of their keys: by such a
        list the newest commit is found."""
        for name in ("m", "z", "A", "0", "a", "a-b", "a.b", "a_b"):
            self._store.put_if_absent(self._key(f"order/{name}"), [_CONTENT])
        prefix = f"{self.prefix}order/"
        expected = sorted(key for key in self._left if key.startswith(prefix))
        listed = [info.key for info in self._store.list(prefix)]
        if sorted(listed) != expected:
            return failed(
                f"a list has only {len(listed)} of {len(expected)} objects that were just written",
                _USE_ANOTHER,
            )
        after = [info.key for info in self._store.list(prefix, start_after=expected[2])]
        if listed != expected or after != expected[3:]:
            return failed(
                "the store does not list keys in order of their bytes, or ignores the key after which a list begins",
                "use a general-purpose bucket: directory buckets (S3 Express) and some gateways are not supported",
            )
        return ok(f"{len(listed)} objects were listed directly after they were written")

    def _multipart(self) -> CheckFinding:
        key = self._key("large")
        self._store.put_if_absent(key, [bytes(PART_BYTES), _CONTENT])
        if self._may_read() and self._store.get_range(key, PART_BYTES - 1, 3) != b"\0" + _CONTENT[:2]:
            return failed("an object of several parts has other bytes than were written", _USE_ANOTHER)
        return ok(f"an object of {PART_BYTES + len(_CONTENT):,} bytes was uploaded in parts")

    def _large(self) -> CheckFinding:
        """Whether an object of the size up to which one request is used can be written: proxies may limit bodies."""
        pieces = [bytes(PIECE_BYTES)] * (self._largest_put_bytes // PIECE_BYTES)
        self._store.put_if_absent(self._key("largest"), pieces)
        return ok(f"an object of {PIECE_BYTES * len(pieces):,} bytes was uploaded in one PUT")

    def _may_read(self) -> bool:
        """Whether this account may read objects; one that only uploads may not."""
        try:
            self._store.get_range(self._key("small"), 0, 1)
        except TieredError as error:
            if denied_action(error):
                return False
            raise
        return True

    def _copy(self) -> CheckFinding:
        """Whether the store copies ranges of objects itself, so that compaction need not transfer them."""
        copied = self._key("copied")
        self._store.compose_if_absent(
            copied, [ObjectRange(self._key("large"), 0, PART_BYTES), _CONTENT[::-1]]
        )
        if self._store.get_range(copied, PART_BYTES - 1, 3) != b"\0" + _CONTENT[:-3:-1]:
            return failed("a copied part has other bytes than its source", _USE_ANOTHER)
        return ok("a part of another object was copied")

    def _abort(self) -> CheckFinding:
        assert self._probe is not None
        self._probe.start_and_abort_upload(self._key("aborted"))
        return ok("parts of a failed upload can be removed")

    def _checksum(self) -> CheckFinding:
        assert self._probe is not None
        if self._probe.accepts_damaged(self._key("damaged")):
            return failed("a body was stored that does not match its CRC32C", _USE_ANOTHER)
        return ok("CRC32C")

    def _delete(self) -> CheckFinding:
        """Whether this account may delete objects: deletes those of the other checks, or else says where they are."""
        keys = list(self._left)
        try:
            self._store.delete(keys)
        except TieredError as error:
            finding = failed_by(error, self._policy)
            rest = f"then delete the objects of this check below {self._store.url}/{self.prefix}"
            return CheckFinding(
                finding.outcome, finding.detail, f"{finding.fix}; {rest}".lstrip("; "), finding.is_temporary
            )
        self._left.clear()
        return self._gone(keys[0])

    def _gone(self, key: str) -> CheckFinding:
        """Whether the deleted object ``key`` is gone. A denied read counts as gone: an account that may not list gets
        that answer for an object that does not exist."""
        try:
            self._store.get(key, PART_BYTES)
        except NotFoundError:
            return ok(f"this check has deleted its objects below {self.prefix}")
        except TieredError as error:
            if not denied_action(error):
                raise
            return ok(f"the objects of this check, below {self.prefix}, were deleted")
        return failed("an object can still be read after it was deleted", _USE_ANOTHER)
