"""Rings of keys that wrap an archive's keys: a key file, AWS KMS, or a command.

Does not know what is wrapped, nor where wrapped keys are stored. Key material is in no message, log record or argument
of a command.
"""

import base64
import binascii
import os
import re
import resource
import secrets
import stat
import subprocess  # nosec B404
from pathlib import Path
from typing import Any, Final, Protocol

from tiered.errors import EncryptionKeyError, KeyRingAwayError, UsageError
from tiered.object_store.interface import StoreOptions
from tiered.object_store.s3_client import client_arguments, quiet_sdk_logs
from tiered.private_directory import is_own

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
SETTING: Final = "object_store.key_ring"
TIMEOUT_S: Final = 10
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_EX_TEMPFAIL = 75
_WRONG_CODES = frozenset({"InvalidCiphertextException", "IncorrectKeyException"})
_AWAY_CODES = frozenset({"ThrottlingException", "LimitExceededException", "ExpiredTokenException"})
_AWAY_STATUSES = frozenset({408, 429, *range(500, 600)})


class KeyRing(Protocol):
    """Wraps and unwraps keys of KEY_BYTES with the ring keys that it has. Thread-safe.

    ``place`` is part of what is wrapped: only the same text unwraps it. Both raise EncryptionKeyError for a ring key
    that the ring does not have or may not use, and KeyRingAwayError when it cannot answer now.
    """

    @property
    def current(self) -> str:
        """The id of the ring key that wraps new keys."""

    def wrap(self, ring_key: str, key: bytes, place: str) -> bytes:
        """``key`` wrapped by ``ring_key``."""

    def unwrap(self, ring_key: str, wrapped: bytes, place: str) -> bytes:
        """The key that ``wrap`` was given."""


class FileKeys:
    """Keys in a file that only its owner can read: a line for each, its id and 32 bytes in base64. The last one is the
    current one; lines that begin with ``#`` are comments."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises UsageError if it is not one, or if others can read it."""
        self._path = path
        self._keys = _file_keys(path)

    @property
    def current(self) -> str:
        return next(reversed(self._keys))

    def wrap(self, ring_key: str, key: bytes, place: str) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + bytes(self._cipher(ring_key).encrypt(nonce, key, place.encode()))

    def unwrap(self, ring_key: str, wrapped: bytes, place: str) -> bytes:
        from cryptography.exceptions import InvalidTag

        nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
        try:
            return bytes(self._cipher(ring_key).decrypt(nonce, sealed, place.encode()))
        except (InvalidTag, ValueError):
            raise wrong_key(ring_key, self._path) from None

    def _cipher(self, ring_key: str) -> Any:
        """AES-GCM with the key ``ring_key`` of the file. Raises EncryptionKeyError if the file does not have it."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # import takes 0.05 s

        key = self._keys.get(ring_key)
        if key is None:
            raise EncryptionKeyError(
                f"key {ring_key} is not in {self._path}",
                hint="add it to the file: what it encrypted cannot be read without it",
            )
        return AESGCM(key)


def _file_keys(path: Path) -> dict[str, bytes]:
    """Id and bytes of every key of the key file, in its order. Raises UsageError if it is not one, or if others than
    its owner can read it."""
    try:
        status = path.stat()
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{SETTING} = {path} cannot be read: {why}", hint=f"set {SETTING}") from None
    is_closed = is_own(status) and not status.st_mode & (stat.S_IRWXO | stat.S_IWGRP)
    if not is_closed or not stat.S_ISREG(status.st_mode):
        raise UsageError(
            f"{SETTING} = {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"chmod 600 {path}",
        )
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key = _base64(words[1]) if len(words) == 2 else None
        if key is None or len(key) != KEY_BYTES or _NAME.fullmatch(words[0]) is None or words[0] in keys:
            raise UsageError(
                f"{path}: line {number} is not a key, or repeats the id of another",
                hint="write a unique id and 32 bytes in base64",
            )
        keys[words[0]] = key
    if not keys:
        raise UsageError(f"{SETTING} = {path} has no key", hint="write an id and 32 bytes in base64")
    return keys


def _base64(text: str | bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def wrong_key(ring_key: str, where: object) -> EncryptionKeyError:
    """The error for a ring key that did not wrap what it is given."""
    return EncryptionKeyError(
        f"key {ring_key} of {where} is not the one that this archive was encrypted with",
        hint=f"set {SETTING} to the ring of this archive",
    )


class KmsKeys:
    """AWS KMS: key material never leaves it. Ring keys are ids, aliases or ARNs of symmetric keys."""

    def __init__(self, current: str, options: StoreOptions) -> None:
        """Makes no request: the first one connects."""
        self.current = current
        self._options = options
        self._client: Any = None

    def wrap(self, ring_key: str, key: bytes, place: str) -> bytes:
        return bytes(self._call("encrypt", ring_key, place, Plaintext=key)["CiphertextBlob"])

    def unwrap(self, ring_key: str, wrapped: bytes, place: str) -> bytes:
        return bytes(self._call("decrypt", ring_key, place, CiphertextBlob=wrapped)["Plaintext"])

    def _call(self, action: str, ring_key: str, place: str, **arguments: bytes) -> Any:
        """The answer of KMS, within TIMEOUT_S. Raises KeyRingAwayError if KMS cannot answer now, else
        EncryptionKeyError."""
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            ConnectionError,
            CredentialRetrievalError,
            HTTPClientError,
        )

        try:
            self._client = self._client or self._connected()
            context = {"rocketmq-tiered": place}
            return getattr(self._client, action)(KeyId=ring_key, EncryptionContext=context, **arguments)
        except ClientError as error:
            code = str(error.response["Error"]["Code"])
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if code in _WRONG_CODES:
                raise wrong_key(ring_key, "AWS KMS") from None
            why, is_away = code, code in _AWAY_CODES or status in _AWAY_STATUSES
        except (BotoCoreError, ValueError) as error:  # "Invalid endpoint"
            why = type(error).__name__
            is_away = isinstance(error, ConnectionError | HTTPClientError | CredentialRetrievalError)
        if is_away:
            raise _away(ring_key, f"AWS KMS: {why}")
        raise EncryptionKeyError(
            f"AWS KMS does not {action} with key {ring_key}: {why}",
            hint=f"check the key, its policy, and {SETTING}",
        )

    def _connected(self) -> Any:
        """A client of KMS, in the region that the current key's ARN names, else in that of the object store."""
        import boto3  # import takes 0.4 s
        from botocore.config import Config

        quiet_sdk_logs()
        arn = self.current.split(":")
        region = arn[3] if len(arn) > 4 else self._options.settings.region
        config = Config(
            connect_timeout=TIMEOUT_S / 2,
            read_timeout=TIMEOUT_S,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        arguments = client_arguments(self._options) | {"endpoint_url": None, "region_name": region or None}
        return boto3.session.Session().client("kms", config=config, **arguments)


def _away(ring_key: str, why: str) -> KeyRingAwayError:
    return KeyRingAwayError(f"key {ring_key} cannot be used now: {why}")


class CommandKeys:
    """A program for HSMs, Vault and others: ``PROGRAM wrap|unwrap KEY`` reads base64 from its input and writes base64
    to its output. Its environment has the place as TIERED_PLACE. Exit code 75 is *not now*, others are refusals."""

    def __init__(self, current: str, program: str) -> None:
        self.current = current
        self._program = program

    def wrap(self, ring_key: str, key: bytes, place: str) -> bytes:
        return self._call("wrap", ring_key, key, place)

    def unwrap(self, ring_key: str, wrapped: bytes, place: str) -> bytes:
        return self._call("unwrap", ring_key, wrapped, place)

    def _call(self, action: str, ring_key: str, data: bytes, place: str) -> bytes:
        """What the program answers, within TIMEOUT_S; its stderr is that of this process. Raises KeyRingAwayError if it
        cannot answer now, else EncryptionKeyError; UsageError if it cannot be run."""
        try:
            answer = subprocess.run(  # nosec B603 - the program that the settings name
                [self._program, action, ring_key],
                input=base64.b64encode(data) + b"\n",
                stdout=subprocess.PIPE,
                timeout=TIMEOUT_S,
                env={**os.environ, "TIERED_PLACE": place},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _away(ring_key, f"{self._program} has not answered within {TIMEOUT_S} s") from None
        except OSError as error:
            raise UsageError(
                f"{SETTING}: {self._program} cannot be run: {error.strerror}",
                hint=f"set {SETTING} to a program that this user may run",
            ) from None
        if answer.returncode == _EX_TEMPFAIL:
            raise _away(ring_key, f"{self._program} ended with exit code {_EX_TEMPFAIL}, which says so")
        result = _base64(answer.stdout.strip())
        if answer.returncode or not result:
            raise EncryptionKeyError(
                f"{self._program} does not {action} with key {ring_key} (exit code {answer.returncode})",
                hint=f"run {self._program} {action} {ring_key} in a shell to see why",
            )
        return result


def open_ring(options: StoreOptions) -> KeyRing | None:
    """The ring that the settings name; None: nothing is encrypted. With one, this process writes no core files. Raises
    UsageError."""
    text = options.settings.key_ring
    kind, _, rest = text.partition(":")
    if not text:
        return None
    # Keys are in the memory of this process from now on, and would be in its core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if text.startswith("/"):
        return FileKeys(Path(text))
    if kind == "aws-kms" and rest:
        return KmsKeys(rest, options)
    name, _, program = rest.partition(":")
    if kind == "command" and name and program.startswith("/"):
        return CommandKeys(name, program)
    raise UsageError(
        f"{SETTING} = {text} is not a key ring",
        hint="use /path/of/keys, aws-kms:KEY or command:KEY:/path/of/program",
    )
