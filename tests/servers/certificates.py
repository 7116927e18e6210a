"""Certificates for servers and clients of tests, made by the openssl command: a CA, and what it signs.

Owns the files. Keys are PKCS#8 and not encrypted, as Java wants them.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

LOCAL = "DNS:localhost,IP:127.0.0.1,IP:::1"
_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


@dataclass(frozen=True)
class Certificate:
    """Paths of a PEM certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A CA that no system trusts, with its files in ``directory``."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory, self._name = directory, name
        directory.mkdir(parents=True, exist_ok=True)
        self._openssl(f"req -x509 {_NEW_KEY} -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem")
        self.certificate = directory / f"{name}.pem"

    def signed(self, name: str, hosts: str = LOCAL, days: int = 2) -> Certificate:
        """A certificate of ``hosts`` (a subjectAltName); with 0 ``days`` it has expired when the next second begins."""
        (self._directory / f"{name}.ext").write_text(f"subjectAltName={hosts}\n")
        self._openssl(f"req {_NEW_KEY} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        self._openssl(
            f"x509 -req -in {name}.csr -CA {self._name}.pem -CAkey {self._name}.key -CAcreateserial -days {days} "
            f"-extfile {name}.ext -out {name}.pem"
        )
        return Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")

    def self_signed(self, name: str, hosts: str = LOCAL) -> Certificate:
        """A self-signed certificate."""
        self._openssl(
            f"req -x509 {_NEW_KEY} -days 2 -subj /CN={name} -addext subjectAltName={hosts} "
            f"-keyout {name}.key -out {name}.pem"
        )
        return Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")

    def encrypted(self, key: Path) -> Path:
        """``key`` behind a password."""
        found = key.with_suffix(".encrypted")
        self._openssl(f"pkcs8 -topk8 -in {key} -out {found} -passout pass:secret")
        return found

    def _openssl(self, words: str) -> None:
        done = subprocess.run(
            ["openssl", *words.split()], cwd=self._directory, check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"openssl {words}: {done.stderr}")
