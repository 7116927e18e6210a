"""What only an S3 bucket has: versioning, Object Lock, lifecycle rules, checksums and uploads in parts, for diagnosis.

One call is one or two requests. Errors are those of ObjectStore. Archives never depend on these answers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiered.object_store.body import crc32c_base64
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import StoreAddress, check_addresses
from tiered.object_store.s3 import S3Store
from tiered.object_store.s3_client import encryption_of

_NOT_CONFIGURED = frozenset({"NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError"})
_DAY_TEXT_END = 10
"""Length of a date in ISO 8601, without the time."""


@dataclass(frozen=True)
class LockRule:
    """Object Lock's default retention; ``mode`` is empty if the bucket has none."""

    mode: str
    period: str


@dataclass(frozen=True)
class LifecycleRule:
    """One enabled rule. Texts say when an action takes place, such as "30 days"; empty: never."""

    name: str
    prefix: str
    expires: str = ""
    noncurrent_expires: str = ""
    moves: str = ""
    """When and to which storage class objects are moved."""
    aborts_uploads: str = ""


class BucketProbe:
    """One bucket, through a client of its own. Not thread-safe."""

    def __init__(self, address: StoreAddress, options: StoreOptions) -> None:
        self._address = address
        self._options = options
        self._store = S3Store(address.place, options)
        self.is_aws = not options.settings.endpoint_url
        """Whether the endpoint is AWS's; refined by the first request, which reads the SDK's configuration."""

    def versioning(self) -> str:
        """``Enabled``, ``Suspended``, or empty."""
        with self._request("") as (client, bucket):
            return str(client.get_bucket_versioning(**bucket).get("Status", ""))

    def object_lock(self) -> LockRule | None:
        """For how long the bucket keeps new objects from being deleted (Object Lock), if at all; None: Object Lock is
        disabled."""
        with self._request("") as (client, bucket):
            answer = _unless_absent(client.get_object_lock_configuration, bucket)
        configuration = answer.get("ObjectLockConfiguration", {})
        if configuration.get("ObjectLockEnabled") != "Enabled":
            return None
        retention = configuration.get("Rule", {}).get("DefaultRetention", {})
        return LockRule(retention.get("Mode", ""), _period(retention))

    def lifecycle(self) -> list[LifecycleRule]:
        """The enabled rules."""
        with self._request("") as (client, bucket):
            answer = _unless_absent(client.get_bucket_lifecycle_configuration, bucket)
        return [lifecycle_rule(rule) for rule in answer.get("Rules", ()) if rule.get("Status") == "Enabled"]

    def accepts_damaged(self, key: str) -> bool:
        """Put an object whose body does not match the CRC32C that is sent with it, and return whether the store
        accepted it, which it should not. The object may exist afterwards."""
        with self._request(key) as (client, bucket):
            sent, meant = b"damaged", crc32c_base64([memoryview(b"correct")])
            try:
                client.put_object(
                    **bucket,
                    Key=self._key(key),
                    Body=sent,
                    ChecksumCRC32C=meant,
                    IfNoneMatch="*",
                    **encryption_of(self._options.settings),
                )
            except client.exceptions.ClientError as error:
                status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
                if 400 <= status < 500 and status != 403:  # 403: the account may not put objects
                    return False
                raise
        return True

    def start_and_abort_upload(self, key: str) -> None:
        """Start an upload in parts and abort it."""
        with self._request(key) as (client, bucket):
            place = bucket | {"Key": self._key(key)}
            upload = client.create_multipart_upload(**place, **encryption_of(self._options.settings))
            client.abort_multipart_upload(**place, UploadId=upload["UploadId"])

    def close(self) -> None:
        """Release connections."""
        self._store.close()

    def _key(self, key: str) -> str:
        return f"{self._address.prefix}/{key}" if self._address.prefix else key

    @contextmanager
    def _request(self, key: str) -> Iterator[tuple[Any, dict[str, str]]]:
        """The SDK's client, connected at the first request, and the argument that names the bucket, for a request about
        ``key``, empty for the bucket itself. The SDK's errors in the block are raised as errors of tiered.errors."""
        with self._store.requests(self._key(key) if key else "") as client:
            self.is_aws = client.meta.endpoint_url.endswith((".amazonaws.com", ".amazonaws.com.cn"))
            yield client, {"Bucket": self._address.place}


def open_probe(url: str, options: StoreOptions) -> BucketProbe | None:
    """The bucket of an s3:// URL, with keys below its prefix; None for other URLs. The first request connects."""
    address = check_addresses(url, options.settings.endpoint_url)
    return BucketProbe(address, options) if address.scheme == "s3" else None


def lifecycle_rule(rule: Mapping[str, Any]) -> LifecycleRule:
    """A lifecycle rule of a bucket, from an entry of the answer to GetBucketLifecycleConfiguration. Pure."""
    condition = rule.get("Filter", {})
    prefix = condition.get("And", condition).get("Prefix", rule.get("Prefix", "")) or ""
    moves = [f"{_period(move)} to {move.get('StorageClass', '')}" for move in rule.get("Transitions", ())]
    return LifecycleRule(
        name=str(rule.get("ID", "")),
        prefix=str(prefix),
        expires=_period(rule.get("Expiration", {})),
        noncurrent_expires=_period(rule.get("NoncurrentVersionExpiration", {})),
        moves=", ".join(moves),
        aborts_uploads=_period(rule.get("AbortIncompleteMultipartUpload", {})),
    )


def _period(action: Mapping[str, Any]) -> str:
    """When the action of a bucket's rule takes place, as text: after some days or years, or at a date; empty: never."""
    for name in ("Days", "NoncurrentDays", "DaysAfterInitiation"):
        if name in action:
            return f"{action[name]} days"
    if "Years" in action:
        return f"{action['Years']} years"
    return str(action["Date"])[:_DAY_TEXT_END] if "Date" in action else ""


def _unless_absent(request: Any, bucket: dict[str, str]) -> dict[str, Any]:
    """The answer to ``request``, which reads a configuration of ``bucket``; empty if the bucket has no such
    configuration."""
    try:
        answer: dict[str, Any] = request(**bucket)
    except Exception as error:
        if getattr(error, "response", {}).get("Error", {}).get("Code", "") in _NOT_CONFIGURED:
            return {}
        raise
    return answer
