"""Maps S3 responses and SDK exceptions to our errors, for both clients. Connection failures are in s3_transport.py."""

import traceback
from types import FrameType
from typing import Any

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
)

_CLOCK = "set this machine's clock"
_REGION = (
    "set object_store.region (--region) and object_store.endpoint_url (--endpoint-url) to those of the bucket"
)
_KEYS = "check the credentials of the SDK's chain and the bucket policy"
_VIRTUAL = (
    "set object_store.addressing_style = virtual: the store accepts the bucket's name only in the host name"
)
_KMS_KEY = "check the bucket's KMS key: it must be enabled, and the account needs kms:GenerateDataKey and kms:Decrypt"
_BODY_LIMIT = (
    "raise the limit of the proxy before the object store (nginx: client_max_body_size) to 64 MiB or more"
)
_ENCRYPTION = "if the bucket demands encryption, set object_store.server_side_encryption to AES256 or aws:kms"

_BY_CODE: dict[str, tuple[type[TieredError], str]] = {
    "NoSuchBucket": (NotFoundError, "create the bucket first"),
    "NoSuchKey": (NotFoundError, ""),
    # The parts were cleaned up, or a proxy completed the upload by sending the request twice. The next attempt is
    # another upload, which needs none of them.
    "NoSuchUpload": (UnansweredError, "the object store no longer has the parts of this upload"),
    "PreconditionFailed": (AlreadyExistsError, ""),
    "ConditionalRequestConflict": (ThrottledError, ""),
    "OperationAborted": (ThrottledError, ""),
    "SlowDown": (ThrottledError, ""),
    "Throttling": (ThrottledError, ""),
    "RequestLimitExceeded": (ThrottledError, ""),
    # The body was damaged in transit: nothing was stored, the same bytes may be sent again.
    "BadDigest": (ThrottledError, "the object arrived damaged, and was not stored"),
    "XAmzContentChecksumMismatch": (ThrottledError, "the object arrived damaged, and was not stored"),
    "XAmzContentSHA256Mismatch": (ThrottledError, "the object arrived damaged, and was not stored"),
    "IncompleteBody": (ThrottledError, "the object arrived incomplete, and was not stored"),
    "RequestTimeout": (UnansweredError, ""),
    "InternalError": (UnansweredError, ""),
    "XMinioStorageFull": (StoreFullError, "free space in the object store"),
    "InsufficientStorage": (StoreFullError, "free space in the object store"),
    "QuotaExceeded": (StoreFullError, "raise the bucket's quota"),
    "XMinioAdminBucketQuotaExceeded": (StoreFullError, "raise the bucket's quota"),
    "RequestTimeTooSkewed": (RefusedRequestError, _CLOCK),
    "RequestExpired": (RefusedRequestError, _CLOCK),
    "AuthorizationHeaderMalformed": (RefusedRequestError, _REGION),
    "PermanentRedirect": (RefusedRequestError, _REGION),
    "IllegalLocationConstraintException": (RefusedRequestError, _REGION),
    "InvalidBucketName": (RefusedRequestError, "check the bucket's name"),
    # Of Alibaba Cloud OSS, Tencent COS and Volcengine TOS, in this order.
    "SecondLevelDomainForbidden": (RefusedRequestError, _VIRTUAL),
    "PathStyleDomainForbidden": (RefusedRequestError, _VIRTUAL),
    "InvalidPathAccess": (RefusedRequestError, _VIRTUAL),
    "EntityTooLarge": (RefusedRequestError, _BODY_LIMIT),
    "MaxMessageLengthExceeded": (RefusedRequestError, _BODY_LIMIT),
    "KMS.DisabledException": (AccessDeniedError, _KMS_KEY),
    "KMS.KMSInvalidStateException": (AccessDeniedError, _KMS_KEY),
    "KMS.NotFoundException": (AccessDeniedError, _KMS_KEY),
    "InvalidEncryptionAlgorithmError": (RefusedRequestError, _ENCRYPTION),
    "ServerSideEncryptionConfigurationNotFoundError": (RefusedRequestError, _ENCRYPTION),
    "AllAccessDisabled": (AccessDeniedError, "the provider has disabled the bucket: ask its support"),
    "AccountProblem": (AccessDeniedError, "the provider has suspended the account: ask its support"),
    "UserDisable": (AccessDeniedError, "the provider has suspended the account: check its balance"),
    "ExpiredToken": (AccessDeniedError, "renew the credentials"),
    "InvalidAccessKeyId": (AccessDeniedError, _KEYS),
    "SignatureDoesNotMatch": (AccessDeniedError, _KEYS),
    "AccessDenied": (AccessDeniedError, _KEYS),
    "InvalidObjectState": (
        RefusedRequestError,
        "restore the object, which a lifecycle rule has moved to archive storage",
    ),
    "InvalidRange": (CorruptionError, ""),
    "NotImplemented": (
        RefusedRequestError,
        "use another object store: this one lacks an operation that archives need",
    ),
}

_BY_STATUS: dict[int, tuple[type[TieredError], str]] = {
    301: (RefusedRequestError, _REGION),
    307: (ThrottledError, ""),
    401: (AccessDeniedError, _KEYS),
    403: (AccessDeniedError, _KEYS),
    404: (NotFoundError, ""),
    407: (RefusedRequestError, "add name and password to the proxy in HTTPS_PROXY or HTTP_PROXY"),
    408: (UnansweredError, ""),
    409: (ThrottledError, ""),
    412: (AlreadyExistsError, ""),
    413: (RefusedRequestError, _BODY_LIMIT),
    416: (CorruptionError, ""),
    429: (ThrottledError, ""),
    501: (RefusedRequestError, "use another object store: this one lacks an operation that archives need"),
    503: (ThrottledError, ""),
    507: (StoreFullError, "free space in the object store"),
}

_THROTTLING = "Throttl"
"""A part of the codes of services behind the store, with status 400: KMS returns ThrottlingException."""
_NO_EFFECT = frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"})
"""The SDK's exceptions for requests that were never sent."""
_CREDENTIALS = ("Credential", "Token", "SSO", "Profile", "AssumeRole")
"""Words in the names of the SDK's exceptions about credentials."""
_DENIED = "AccessDenied"

_ACTIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "UploadPartCopy": "s3:PutObject or s3:GetObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "DeleteObjects": "s3:DeleteObject",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
}
"""What a policy calls the SDK's operations; the others have the same name."""
_CREATING = frozenset({"PutObject", "CreateMultipartUpload"})
"""A policy that demands an encryption header gives them the same answer as one that does not allow them."""


def s3_error(error: Exception, where: str) -> TieredError:
    """The error of tiered.errors for an exception of the AWS SDK, by what the caller has to do next. ``where``: the
    object's URL, without secrets; an error that is of tiered.errors already gets it in its text."""
    if isinstance(error, TieredError):
        return _placed(error, where)
    response: dict[str, Any] | None = getattr(error, "response", None)
    if response is not None and "Error" in response:
        return error_of_answer(response, where, getattr(error, "operation_name", ""))
    name = type(error).__name__
    if name in _NO_EFFECT:
        return ThrottledError(f"{where}: the object store's endpoint cannot be reached")
    if name == "CredentialRetrievalError":
        # Its text may contain a secret. It may be temporary: at boot the agent may start later.
        return ThrottledError(f"{where}: the credential provider does not respond", hint=_KEYS)
    if any(word in name for word in _CREDENTIALS):
        return AccessDeniedError(f"{where}: no usable credentials ({name})", hint=_KEYS)
    if name == "ParamValidationError" and "bucket" in str(error).lower():
        return RefusedRequestError(
            f"{where}: the bucket's name is invalid", hint="correct the bucket's name in the archive URL"
        )
    if name in ("ParamValidationError", "InvalidRegionError", "NoRegionError", "InvalidProxiesConfigError"):
        return RefusedRequestError(f"{where}: the AWS SDK refuses to send the request ({name})", hint=_REGION)
    if isinstance(error, ValueError):  # the SDK's "Invalid endpoint: ..."
        return RefusedRequestError(f"{where}: {error}", hint=_REGION)
    return UnansweredError(f"{where}: the object store gave no usable response ({name})")


def is_denied(error: TieredError) -> bool:
    """Whether ``error`` is of the answer AccessDenied: a policy does not allow the request, or its object does not
    exist, as S3 gives accounts that may not list the bucket the same answer for both."""
    response = getattr(error.__cause__, "response", None)
    return response is not None and response["Error"].get("Code") == _DENIED


def with_new_keys(refused: TieredError) -> ThrottledError:
    """The error to raise instead of ``refused`` if the access keys of that request have been replaced since."""
    message = f"{refused.message} (the access keys have been replaced since this request)"
    return ThrottledError(message, hint="nothing has to be done: later requests use the new keys")


def _placed(error: TieredError, where: str) -> TieredError:
    return error if where in error.message else type(error)(f"{where}: {error.message}", hint=error.hint)


def error_of_answer(response: dict[str, Any], where: str, operation: str) -> TieredError:
    """The error of tiered.errors for an error answer of the object store, by its code or HTTP status. ``where``: the
    object's URL; ``operation``: the SDK's name of the request. A denied one names the action that the policy has to
    allow."""
    code = str(response["Error"].get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    error_type, hint = _BY_CODE.get(code) or _by_status(status, code)
    explanation = str(response["Error"].get("Message", "")).rstrip(".")
    described = f"{where}: {code}" if code and not code.isdigit() else f"{where}: HTTP {status}"
    if code == _DENIED and operation:
        action = _ACTIONS.get(operation, f"s3:{operation}")
        described = f"{where}: {action}: {code}"
        hint = f"allow {action} there in the account's policy and the bucket's"
        if operation in _CREATING:
            hint += f"; {_ENCRYPTION}"
    if explanation and explanation not in ("Forbidden", "Not Found", "Bad Request"):
        described += f": {explanation}"
    return error_type(described, hint=hint)


def _by_status(status: int, code: str) -> tuple[type[TieredError], str]:
    if _THROTTLING in code:
        return ThrottledError, ""
    otherwise = RefusedRequestError if 300 <= status < 500 else UnansweredError
    return _BY_STATUS.get(status, (otherwise, ""))


def release_frames(error: BaseException) -> None:
    """Free what the failed calls behind ``error`` and its causes still hold, such as the body of a PUT: clear the local
    variables of their frames.

    The SDK's exceptions refer to frames that refer to them. The garbage collector, which counts objects, not bytes,
    would free them late.
    """
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        current = errors.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        for frame, _line in traceback.walk_tb(current.__traceback__):
            _clear_with_callers(frame)
        errors += (current.__cause__, current.__context__)


def _clear_with_callers(frame: FrameType | None) -> None:
    """Clear the local variables of ``frame`` and of its callers up to the first that still runs. A caller that caught
    the error is in no traceback, so that it is found this way only."""
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:  # still running, and so are its callers
            return
        frame = frame.f_back
