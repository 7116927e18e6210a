"""The table of S3's answers, without a server; and bodies as pieces."""

import base64
import zlib
from typing import Any

import pytest
from fastcrc import crc32
from hypothesis import given
from hypothesis import strategies as st

from tiered.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptionError,
    NotFoundError,
    RefusedRequestError,
    StoreFullError,
    ThrottledError,
    TieredError,
    UnansweredError,
    UsageError,
)
from tiered.object_store.body import (
    JOINED_BYTES_MAX,
    PieceReader,
    as_views,
    coalesced,
    crc32c_base64,
    parts,
    size_bytes,
)
from tiered.object_store.open_store import parse_url
from tiered.object_store.s3_errors import s3_error


class AnswerError(Exception):
    """An answer in the shape of the SDK's ClientError."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.response: dict[str, Any] = {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


@pytest.mark.parametrize(
    ("status", "code", "operation", "hint"),
    [
        (
            403,
            "SecondLevelDomainForbidden",
            "ListObjectsV2",
            "object_store.addressing_style = virtual",
        ),  # OSS
        (403, "PathStyleDomainForbidden", "ListObjectsV2", "object_store.addressing_style = virtual"),  # COS
        (413, "413", "PutObject", "client_max_body_size"),  # nginx, without XML
        (400, "EntityTooLarge", "PutObject", "client_max_body_size"),
        (403, "AccessDenied", "PutObject", "set object_store.server_side_encryption"),
        (403, "AccessDenied", "CreateMultipartUpload", "set object_store.server_side_encryption"),
        (403, "AccessDenied", "GetObject", "allow s3:GetObject there"),
        (400, "KMS.DisabledException", "GetObject", "KMS key"),
        (403, "UserDisable", "PutObject", "suspended the account"),  # OSS
        (403, "QuotaExceeded", "PutObject", "raise the bucket's quota"),  # Ceph
        (403, "RequestTimeTooSkewed", "PutObject", "set this machine's clock"),
    ],
)
def test_an_answer_has_the_hint_of_its_cause(status: int, code: str, operation: str, hint: str) -> None:
    answer = AnswerError(status, code)
    answer.operation_name = operation  # type: ignore[attr-defined]
    found = s3_error(answer, "s3://bucket/key")
    assert hint in found.hint
    if operation not in ("PutObject", "CreateMultipartUpload"):
        assert "server_side_encryption" not in found.hint


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "NoSuchBucket", NotFoundError),
        (404, "NoSuchKey", NotFoundError),
        (404, "404", NotFoundError),
        (412, "PreconditionFailed", AlreadyExistsError),
        (409, "ConditionalRequestConflict", ThrottledError),
        (503, "SlowDown", ThrottledError),
        (503, "SlowDownWrite", ThrottledError),
        (429, "TooManyRequests", ThrottledError),
        (500, "InternalError", UnansweredError),
        (502, "502", UnansweredError),
        (504, "504", UnansweredError),
        (400, "RequestTimeout", UnansweredError),
        (400, "BadDigest", ThrottledError),
        (507, "XMinioStorageFull", StoreFullError),
        (507, "507", StoreFullError),
        (403, "QuotaExceeded", StoreFullError),
        (403, "AccessDenied", AccessDeniedError),
        (403, "SignatureDoesNotMatch", AccessDeniedError),
        (403, "403", AccessDeniedError),
        (403, "RequestTimeTooSkewed", RefusedRequestError),
        (400, "AuthorizationHeaderMalformed", RefusedRequestError),
        (301, "PermanentRedirect", RefusedRequestError),
        (400, "InvalidArgument", RefusedRequestError),
        (400, "400", RefusedRequestError),
        (405, "MethodNotAllowed", RefusedRequestError),
        (501, "NotImplemented", RefusedRequestError),
        (416, "InvalidRange", CorruptionError),
    ],
)
def test_answers(status: int, code: str, kind: type[TieredError]) -> None:
    error = s3_error(AnswerError(status, code, "Said by the server."), "s3://bucket/k")
    assert type(error) is kind
    assert str(error).startswith("s3://bucket/k: ")
    assert "Said by the server" in str(error)
    assert "\n" not in str(error)


def test_what_the_operator_does_next_is_said() -> None:
    assert "clock" in s3_error(AnswerError(403, "RequestTimeTooSkewed"), "s3://b").hint
    assert "region" in s3_error(AnswerError(400, "AuthorizationHeaderMalformed"), "s3://b").hint
    assert "create the bucket" in s3_error(AnswerError(404, "NoSuchBucket"), "s3://b").hint
    assert "credentials" in s3_error(AnswerError(403, "AccessDenied"), "s3://b").hint


def test_crc32c_of_pieces() -> None:
    assert crc32c_base64(as_views([b"1234", b"", b"56789"])) == base64.b64encode(b"\xe3\x06\x92\x83").decode()
    assert crc32c_base64([]) == "AAAAAA=="


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 400))
def test_parts_are_exact_and_lose_nothing(pieces: list[bytes], part_bytes: int) -> None:
    content = b"".join(pieces)
    cut = [b"".join(part) for part in parts(as_views(pieces), part_bytes)]
    assert b"".join(cut) == content
    assert all(len(part) == part_bytes for part in cut[:-1])
    assert all(cut)


@given(st.lists(st.one_of(st.binary(max_size=100), st.integers(60_000, 140_000).map(bytes)), max_size=12))
def test_coalescing_keeps_bytes_and_bounds_copies(pieces: list[bytes]) -> None:
    joined = list(coalesced(as_views(pieces)))
    assert b"".join(joined) == b"".join(pieces)
    assert all(len(buffer) <= JOINED_BYTES_MAX for buffer in joined if isinstance(buffer, bytes))


@given(
    st.lists(st.binary(max_size=50), max_size=10),
    st.lists(st.integers(-1, 60), max_size=12),
    st.integers(0, 99),
)
def test_reader_is_a_file(pieces: list[bytes], reads: list[int], seek_to: int) -> None:
    content = b"".join(pieces)
    reader = PieceReader(as_views(pieces))
    assert len(reader) == reader.seek(0, 2) == len(content) == size_bytes(pieces)
    position = reader.seek(min(seek_to, len(content)))
    for amount in reads:
        expected = content[position:] if amount < 0 else content[position : position + amount]
        assert reader.read(amount) == expected
        position += len(expected)
        assert reader.tell() == position
    reader.seek(0)
    assert zlib.crc32(reader.read()) == zlib.crc32(content)
    assert crc32.iscsi(content) == int.from_bytes(base64.b64decode(crc32c_base64(as_views(pieces))), "big")


@pytest.mark.parametrize(
    ("operation", "action"),
    [
        ("GetObject", "s3:GetObject"),
        ("PutObject", "s3:PutObject"),
        ("UploadPart", "s3:PutObject"),
        ("CompleteMultipartUpload", "s3:PutObject"),
        ("ListObjectsV2", "s3:ListBucket"),
        ("DeleteObjects", "s3:DeleteObject"),
    ],
)
def test_a_denial_names_action_and_key(operation: str, action: str) -> None:
    """The request's name is not what a policy grants."""
    denied = AnswerError(403, "AccessDenied", "Access Denied.")
    denied.operation_name = operation  # type: ignore[attr-defined]
    error = s3_error(denied, "s3://bucket/prefix/k")
    assert str(error).startswith(f"s3://bucket/prefix/k: {action}: AccessDenied: Access Denied")
    assert action in error.hint


@pytest.mark.parametrize("place", ["arn:aws:s3:us-east-1:123456789012:accesspoint", "my bucket", "a%20b"])
def test_what_is_no_bucket_name_is_named(place: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a bucket") as raised:
        parse_url(f"s3://{place}/x")
    assert place in str(raised.value) and "region" not in str(raised.value)
