"""Local files that only the process that wrote them can read: AES-256-CTR under a key in its memory. They are not
authenticated: what is made of them is."""

import io
import secrets
from pathlib import Path
from typing import Any

KEY_BYTES, BLOCK_BYTES = 32, 16


def new_secret() -> bytes:
    """A key for bytes that are written once."""
    return secrets.token_bytes(KEY_BYTES)


def secret_cipher(secret: bytes, offset: int = 0) -> Any:
    """Encrypts and decrypts, by ``update``, the bytes of a file from ``offset`` on."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # import takes 0.05 s

    counter = (offset // BLOCK_BYTES).to_bytes(BLOCK_BYTES, "big")
    cipher = Cipher(algorithms.AES(secret), modes.CTR(counter)).encryptor()
    cipher.update(bytes(offset % BLOCK_BYTES))
    return cipher


class SecretFile(io.BufferedWriter):
    """A new file, written from its beginning to its end."""

    def __init__(self, path: Path, secret: bytes) -> None:
        super().__init__(io.FileIO(path, "w"), 1 << 20)
        self._cipher = secret_cipher(secret)

    def write(self, data: Any, /) -> int:
        return super().write(self._cipher.update(data))
