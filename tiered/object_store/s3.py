"""s3://: AWS, MinIO, LocalStack, Ceph and others that support ``If-None-Match: *`` on PUT.

One call is one attempt: the SDK's retries are off. Every body carries its signed CRC32C, which the server checks; the
body is signed too unless the link is TLS or trusted.

Requests of the blocking client; s3_client.py sets up the SDK, which the first request loads.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from tiered.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    RefusedRequestError,
    TieredError,
    UnansweredError,
)
from tiered.object_store.abandonment import abandonable
from tiered.object_store.body import PieceReader, as_views, crc32c_base64, md5_base64, parts, read_file_range
from tiered.object_store.interface import (
    GET_BYTES_MAX,
    Body,
    Buffer,
    FileRange,
    ObjectInfo,
    ObjectRange,
    Piece,
    StoreOptions,
    Upload,
)
from tiered.object_store.key import check_key, is_single_put
from tiered.object_store.part_plan import copied_range, joined_pieces, piece_bytes, plan_parts
from tiered.object_store.s3_client import connect, encryption_of, has_outdated_keys
from tiered.object_store.s3_errors import error_of_answer, is_denied, release_frames, s3_error, with_new_keys
from tiered.object_store.s3_transport import PIECE_BYTES, ResponseLimit, S3Transport, deadline

logger = logging.getLogger(__name__)

Views = list[memoryview]

DELETE_KEYS_MAX = 1000
LIST_KEYS_MAX = 1000
PARTS_MAX = 10_000
ABORT_TIMEOUT_S = 2.0
PATIENT_BYTES_PER_S = 1024 * 1024
"""Without a caller's timeout, a PUT may take the read timeout plus its size at this rate."""


class S3Store:
    """One bucket. Thread-safe; keys are relative to the bucket's root."""

    def __init__(self, bucket: str, options: StoreOptions) -> None:
        """No request is made: the first one loads the SDK and connects. ``options``: the settings, and access keys if
        they are not those of the SDK's chain."""
        self._bucket = bucket
        self._options = options
        self._settings = options.settings
        self._encryption = encryption_of(options.settings)
        self._lock = threading.Lock()
        self._client: Any = None
        self._transport: S3Transport | None = None
        self._has_refused = False
        """Whether the store has refused a PUT to an existing key."""

    @property
    def url(self) -> str:
        """``s3://bucket``."""
        return f"s3://{self._bucket}"

    def __repr__(self) -> str:
        return f"S3Store({self.url!r}, endpoint={self._settings.endpoint_url or 'AWS'!r})"

    # -- writing -----------------------------------------

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        views = as_views(body)
        size = sum(view.nbytes for view in views)
        with self._attempt(key, size, timeout_s):
            self._put(key, views, size)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """Create an object of bytes and of ranges of other objects and files. A small object is one PUT, for which its
        ranges are read; of a large one the store copies ranges of 5 MiB or more, and the rest is sent in parts."""
        size = sum(map(piece_bytes, pieces))
        with self._attempt(key, size, timeout_s):
            if size <= self._settings.multipart_threshold_bytes or is_single_put(key):
                self._put(key, self._read_pieces(joined_pieces(pieces)), size)
                return
            planned = plan_parts(pieces, max(self._settings.multipart_part_bytes, -(-size // PARTS_MAX)))
            copies = any(map(copied_range, planned))
            sources = (copied_range(part) or self._read_pieces(part) for part in planned)
            self._put_in_parts(key, sources, copies=copies)

    def _read_pieces(self, pieces: Sequence[Piece]) -> Views:
        """The bytes of ``pieces``, as those of one request; ranges of objects and files are read."""
        read: list[Buffer] = []
        for piece in pieces:
            if isinstance(piece, ObjectRange):
                read.append(self.get_range(*piece))
            else:
                read.append(read_file_range(piece) if isinstance(piece, FileRange) else piece)
        return as_views(read)

    @contextmanager
    def _attempt(self, key: str, size: int, timeout_s: float | None) -> Iterator[None]:
        """The requests in the block are one attempt to create ``key``, an object of ``size`` bytes: they end by the
        deadline, their errors are raised as errors of tiered.errors, and a failed one keeps no body in memory."""
        check_key(key)
        if timeout_s is None:
            timeout_s = self._settings.read_timeout_ms / 1000 + size / PATIENT_BYTES_PER_S
        try:
            # Loading the SDK, at the first request, does not count towards the timeout.
            with self.requests(key), deadline(timeout_s):
                yield
        except TieredError as error:
            release_frames(error)
            raise

    def _put(self, key: str, views: Views, size: int) -> None:
        """Put the bytes of an object in one request, or in parts above the threshold. Objects of the catalog are always
        one request, as commits depend on that the store refuses it if the object exists. The first of them finds out
        whether the store does."""
        if size <= self._settings.multipart_threshold_bytes or is_single_put(key):
            self._put_whole(key, views)
            if is_single_put(key) and not self._has_refused:
                self._require_refusal(key, views)
        else:
            part_bytes = max(self._settings.multipart_part_bytes, -(-size // PARTS_MAX))
            self._put_in_parts(key, parts(views, part_bytes))

    def _put_whole(self, key: str, views: Views) -> None:
        """Put an object in one request, which the store has to refuse if the object exists. Raises the SDK's errors."""
        checksum = crc32c_base64(views)
        answer = self._connected().put_object(
            Bucket=self._bucket,
            Key=key,
            Body=PieceReader(views),
            ChecksumCRC32C=checksum,
            IfNoneMatch="*",
            **self._encryption,
        )
        _require_stored(answer, checksum)

    def _require_refusal(self, key: str, views: Views) -> None:
        """Put the object ``key``, which exists, again. Raises RefusedRequestError if the store accepts that: it would
        let two writers commit the same catalog version, and one's commit would be lost. After another failure, the next
        commit finds it out."""
        try:
            self._put_whole(key, views)
        except Exception as error:
            translated = s3_error(error, f"{self.url}/{key}")
            self._has_refused = isinstance(translated, AlreadyExistsError)
            return
        raise RefusedRequestError(
            f"{self.url}/{key}: the object store overwrites objects despite If-None-Match: *",
            hint="use a store that supports conditional PUTs, such as AWS S3 or MinIO",
        )

    def _put_in_parts(
        self, key: str, sources: Iterable[Views | ObjectRange], *, copies: bool = False
    ) -> None:
        """Create an object by a multipart upload. Each of ``sources`` is a part: bytes to send, or a range of another
        object to copy, if it ``copies`` any. Then sent parts have MD5 checksums: servers return no CRC32C for a copied
        part, and CRC32Cs would be required of all parts. The upload is aborted after a failure."""
        client = self._connected()
        target = {"Bucket": self._bucket, "Key": key}
        algorithm = {} if copies else {"ChecksumAlgorithm": "CRC32C"}
        upload = client.create_multipart_upload(**target, **algorithm, **self._encryption)
        target["UploadId"] = upload["UploadId"]
        try:
            sent = []
            for number, source in enumerate(sources, start=1):
                place = target | {"PartNumber": number}
                if isinstance(source, ObjectRange):
                    stored = self._copy_part(place, source)
                else:
                    stored = self._send_part(place, source, with_md5=copies)
                sent.append({"PartNumber": number} | stored)
            done = client.complete_multipart_upload(
                **target, MultipartUpload={"Parts": sent}, IfNoneMatch="*"
            )
            _require_stored(done, None)
        except Exception:
            self._abort(target)
            raise

    def _send_part(self, place: dict[str, Any], part: Views, *, with_md5: bool) -> dict[str, str]:
        """Send the bytes of one part, and return its ETag and checksum, which the completion of the upload requires.
        ``place`` names bucket, object, upload and part; ``with_md5``: the upload also has copied parts, which have no
        CRC32C."""
        client = self._connected()
        if with_md5:
            answer = client.upload_part(**place, Body=PieceReader(part), ContentMD5=md5_base64(part))
            _require_stored(answer, None)
            return {"ETag": answer["ETag"]}
        checksum = crc32c_base64(part)
        answer = client.upload_part(**place, Body=PieceReader(part), ChecksumCRC32C=checksum)
        _require_stored(answer, checksum)
        return {"ETag": answer["ETag"], "ChecksumCRC32C": checksum}

    def _copy_part(self, place: dict[str, Any], source: ObjectRange) -> dict[str, str]:
        """Have the store copy a range of another object as one part, and return the part's ETag, which the completion
        of the upload requires. ``place`` names bucket, object, upload and part."""
        with self.requests(source.key) as client:
            answer = client.upload_part_copy(
                **place,
                CopySource={"Bucket": self._bucket, "Key": check_key(source.key)},
                CopySourceRange=f"bytes={source.offset}-{source.offset + source.length - 1}",
            )
            # The SDK raises an error that a response of status 200 contains; an incomplete response has no ETag.
            copied = answer.get("CopyPartResult", {})
            _require_stored(copied, None)
        return {"ETag": copied["ETag"]}

    def _abort(self, target: dict[str, str]) -> None:
        """Abort the multipart upload ``target`` after a failure. Another failure is only logged: parts that remain are
        invisible, and garbage collection removes them."""
        try:
            with deadline(ABORT_TIMEOUT_S), abandonable(None):
                self._connected().abort_multipart_upload(**target)
        except Exception as error:
            logger.warning(
                "an unfinished multipart upload could not be aborted, which garbage collection does later: %s",
                s3_error(error, f"{self.url}/{target['Key']}"),
            )

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects in batches; an object that does not exist counts as deleted."""
        for start in range(0, len(keys), DELETE_KEYS_MAX):
            batch = [check_key(key) for key in keys[start : start + DELETE_KEYS_MAX]]
            with self.requests(batch[0]) as client:
                if len(batch) == 1:
                    client.delete_object(Bucket=self._bucket, Key=batch[0])
                    continue
                answer = client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True}
                )
            for refused in answer.get("Errors", ()):
                where = f"{self.url}/{refused.get('Key', batch[0])}"
                raise error_of_answer({"Error": refused}, where, "DeleteObject")

    # -- reading -----------------------------------------

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        return self._fetch(key, {}, max_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0:
            raise CorruptionError(
                f"{self.url}/{key}: [{offset}, {offset + length}) is not a range of an object"
            )
        if length == 0:
            return b""
        content = self._fetch(key, {"Range": f"bytes={offset}-{offset + length - 1}"}, length)
        return exact_range(content, f"{self.url}/{key}", offset, length)

    def _fetch(self, key: str, range_header: dict[str, str], max_bytes: int) -> bytes:
        """Read an object, or the range of it in ``range_header``, of at most ``max_bytes``. To accounts that may not
        list the whole bucket, S3 answers AccessDenied for a missing object too: then a listing of the key decides."""
        check_key(key)
        try:
            with self.requests(key) as client:
                answer = client.get_object(Bucket=self._bucket, Key=key, **range_header)
                limit = ResponseLimit(max_bytes, f"{self.url}/{key}", is_range=bool(range_header))
                return _read_within(limit, answer)
        except AccessDeniedError as error:
            if is_denied(error) and self._is_absent(key):
                raise NotFoundError(
                    f"{self.url}/{key} does not exist: reading it is denied, and a listing does not have it"
                ) from error
            raise

    def _is_absent(self, key: str) -> bool:
        """Whether a listing shows that there is no object ``key``; False too if the listing fails."""
        try:
            return next((info.key for info in self.list(key, limit=1)), None) != key
        except TieredError:
            return False

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """List objects, one request for each page of up to a thousand. Each page is checked: some stores list in
        another order or ignore where the page should begin. Raises RefusedRequestError for these."""
        left, after = limit, start_after
        page = {"StartAfter": start_after}  # where the next page begins
        while left is None or left > 0:
            wanted = LIST_KEYS_MAX if left is None else min(LIST_KEYS_MAX, left)
            with self.requests(prefix) as client:
                answer = client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=wanted, **page)
            found = listed_objects(answer, prefix, after, where=f"{self.url}/{prefix}")
            yield from found
            after = found[-1].key if found else after
            following = next_page(answer, found)
            if following is None:
                return
            page = following
            left = None if left is None else left - len(found)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Multipart uploads that were neither completed nor aborted."""
        markers: dict[str, str] = {}
        while True:
            with self.requests(prefix) as client:
                answer = client.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix, **markers)
            for found in answer.get("Uploads", ()):
                yield Upload(found["Key"], found["UploadId"], int(found["Initiated"].timestamp() * 1000))
            if not answer.get("IsTruncated"):
                return
            markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def abort_upload(self, upload: Upload) -> None:
        """End an unfinished upload, whose parts cost space; one that is gone already is no error."""
        with self.requests(upload.key) as client:
            try:
                client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)
            except client.exceptions.NoSuchUpload:
                logger.debug("the multipart upload of %s had ended already", upload.key)

    def clock_ms(self, prefix: str = "") -> int:
        """The store's time in ms since the epoch, to the second, from the Date header of a listing below ``prefix``,
        which the account may list."""
        with self.requests(prefix) as client:
            answer = client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date is None:
            raise UnansweredError(f"{self.url}: the response to a listing has no Date header")
        return int(parsedate_to_datetime(date).timestamp() * 1000)

    def close(self) -> None:
        """Close the connections; a later request connects again."""
        with self._lock:
            client, self._client = self._client, None
            transport, self._transport = self._transport, None
        if client is not None:
            client.close()
        if transport is not None:
            transport.close()

    # -- the SDK -----------------------------------------

    def _connected(self) -> Any:
        if self._client is None:
            with self._lock:
                if self._client is None:
                    self._client, self._transport = connect(self._options)
        return self._client

    @contextmanager
    def requests(self, key: str) -> Iterator[Any]:
        """The SDK's client, for requests in the block. Its errors are raised as errors of tiered.errors, each with the
        URL of the object ``key`` (empty: of the bucket). A refusal of access keys that have been replaced in their file
        since becomes an error to retry."""
        client = None
        try:
            client = self._connected()
            yield client
        except TieredError as error:
            raise s3_error(error, f"{self.url}/{key}".rstrip("/")) from error.__cause__
        except Exception as error:
            translated = s3_error(error, f"{self.url}/{key}".rstrip("/"))
            if isinstance(translated, AccessDeniedError) and self._has_outdated_keys(client):
                translated = with_new_keys(translated)
            raise translated from error

    def _has_outdated_keys(self, client: Any) -> bool:
        """Whether other requests than those of ``client`` use new access keys: it is discarded now, as its keys are
        outdated, or was before. Its connections close with their last request."""
        with self._lock:
            if client is self._client and client is not None and has_outdated_keys(client):
                self._client = self._transport = None
            return client is not self._client


def _read_within(limit: ResponseLimit, answer: dict[str, Any]) -> bytes:
    """Read the body of the SDK's answer to a GET. Raises if it is longer than ``limit`` allows, before it is in memory,
    whatever the server sends."""
    body = answer["Body"]
    try:
        refusal = limit.refusal(answer)
        if refusal is not None:
            raise refusal
        if limit.is_bounded(answer):
            return bytes(body.read())
        return b"".join(limit.within(piece) for piece in iter(partial(body.read, PIECE_BYTES), b""))
    except BaseException:
        body.close()  # with its connection, which may send more
        raise


def _require_stored(answer: dict[str, Any], checksum: str | None) -> None:
    """Raise UnansweredError unless ``answer`` to a PUT shows that the bytes with ``checksum`` were stored. A response
    of success without an ETag is not from an object store: any web server may send one."""
    if not answer.get("ETag"):
        raise UnansweredError(
            "the response to a PUT has no ETag, so that it is not from an object store: correct "
            "object_store.endpoint_url"
        )
    stored = answer.get("ChecksumCRC32C", checksum)
    if checksum is not None and stored != checksum:
        raise UnansweredError(
            f"the object store reports that it stored bytes with CRC32C {stored} instead of {checksum}"
        )


def exact_range(content: bytes, where: str, offset: int, length: int) -> bytes:
    """``content`` if it is the whole range, else CorruptionError."""
    if len(content) != length:
        raise CorruptionError(
            f"{where}: the object store returned {len(content)} bytes for the range [{offset}, {offset + length})"
        )
    return content


def next_page(answer: dict[str, Any], found: Sequence[ObjectInfo]) -> dict[str, str] | None:
    """The arguments of ListObjectsV2 for the page after ``answer``, whose objects are ``found``; None at the end.

    The next page begins after the last key, which works on every server, rather than at the server's token. If a bucket
    has very many deleted versions, a page may be empty but not the last: only then the token is used.
    """
    if not answer.get("IsTruncated"):
        return None
    if found:
        return {"StartAfter": found[-1].key}
    token = answer.get("NextContinuationToken")
    return {"ContinuationToken": token} if token else None


def listed_objects(answer: dict[str, Any], prefix: str, after: str, *, where: str) -> list[ObjectInfo]:
    """The objects of one page of a listing, the answer to ListObjectsV2 for keys with ``prefix`` after the key
    ``after``.

    Raises UnansweredError if the answer is no listing, which would look like an empty archive, and RefusedRequestError
    if its keys are not in order and after ``after``: finding the newest commit depends on that. ``where``: the URL for
    messages."""
    if "IsTruncated" not in answer:
        raise UnansweredError(
            f"{where}: the answer to a listing request is not a listing, so that it is not from an object store: "
            "correct object_store.endpoint_url"
        )
    found = [
        ObjectInfo(item["Key"], item["Size"], int(item["LastModified"].timestamp() * 1000))
        for item in answer.get("Contents", ())
    ]
    before = after
    for info in found:
        if info.key <= before or not info.key.startswith(prefix):
            raise RefusedRequestError(
                f"{where}: the object store does not list keys in order, or ignores where a listing should begin",
                hint="use a general-purpose bucket: directory buckets (S3 Express) and some gateways are not supported",
            )
        before = info.key
    return found
