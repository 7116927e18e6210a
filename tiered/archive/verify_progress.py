"""The report of `verify`, and its progress: an interrupted pass continues, and the next pass follows the chain of put
ids from where the last clean one ended.

A pass is of one catalog version. Kept are its positions in the listing and in the chain, which objects were found, and
what was wrong; the pages of the catalog are read again. Owns the document, not the file.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.archive.verify_segment import Anomaly, AnomalyKind
from tiered.catalog.holdings import REPAIR_HINT
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import EncryptionKeyError, UnavailableError, UsageError

SAVE_EVERY_S = 10.0
AGE_MS_MAX = 24 * 3600 * 1000
"""An older pass is repeated from the beginning: objects of its version may have been collected."""


@dataclass
class VerifyPass:
    """A pass over the catalog version ``version``, as far as it got. ``chain``: version and put id up to which the
    chain of commits is checked. ``after``: the object listed last. ``found``: one bit for each object that runs name,
    whether it was listed, packed. ``missing``: objects of the catalog that were not listed yet. ``checked``: window and
    key of the data object checked last; ``counts``: what was counted up to there."""

    version: int = 0
    begun_ms: int = 0
    chain: tuple[int, str] = (0, "")
    after: str = ""
    found: str = ""
    missing: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    pending_deletions: int = 0
    anomalies: list[Anomaly] = field(default_factory=list)
    is_chain_checked: bool = False
    checked: tuple[int, str] = (-1, "")
    counts: dict[str, int] = field(default_factory=dict)

    def pack(self, is_found: NDArray[np.bool_]) -> None:
        """Keep ``is_found`` as text: for each object that runs name, whether it was listed."""
        self.found = base64.b64encode(zlib.compress(np.packbits(is_found).tobytes())).decode()

    def unpack(self, count: int) -> NDArray[np.bool_]:
        """What ``pack`` kept for ``count`` objects; none were found if it kept nothing."""
        if not self.found:
            return np.zeros(count, bool)
        bits = np.frombuffer(zlib.decompress(base64.b64decode(self.found)), np.uint8)
        return np.unpackbits(bits, count=count).astype(bool)


class VerifyProgress:
    """How far the verification of the archive ``url`` got, as ``document``, if any, says: the content of its progress
    file. ``write`` replaces that file; None: there is none.

    Raises UsageError when ``document`` is of another archive or no such document, and what ``write`` raises.
    """

    def __init__(
        self,
        url: str = "",
        document: bytes | None = None,
        write: Callable[[bytes], object] | None = None,
        *,
        clock: Clock = MACHINE_CLOCK,
        age_ms_max: int = AGE_MS_MAX,
    ) -> None:
        """``age_ms_max``: an interrupted pass that is older is not continued."""
        self._url, self._write, self._clock, self._age_ms_max = url, write, clock, age_ms_max
        self._saved_s = time.monotonic()
        """When the file was last written."""
        self.verified: tuple[int, str] = (0, "")
        """Version and put id at which the last clean pass ended."""
        self._begun: VerifyPass | None = None
        """The pass in progress."""
        if document is not None:
            self._load(document)

    def begin(self, head: int) -> VerifyPass:
        """The pass to carry out: the interrupted one, unless it is too old, or a new one over the version ``head``."""
        now_ms, begun = self._clock.wall_ms(), self._begun
        if begun is None or begun.version > head or now_ms - begun.begun_ms > self._age_ms_max:
            begun = VerifyPass(head, now_ms)
        self._begun = begun
        return begun

    @property
    def begun_ms(self) -> int | None:
        """When the pass in progress began; None: there is none."""
        return None if self._begun is None else self._begun.begun_ms

    def save(self, prepare: Callable[[], object] = lambda: None) -> None:
        """Write the document if that is due, after ``prepare``."""
        if self._write is not None and time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            prepare()
            self._write(self._document())
            self._saved_s = time.monotonic()

    def end(self, put_id: str, *, is_clean: bool) -> None:
        """The pass ended; a clean one moves ``verified``."""
        if self._begun is not None and is_clean and self._begun.version > self.verified[0]:
            self.verified = self._begun.version, put_id
        self._begun = None
        if self._write is not None:
            self._write(self._document())

    def _document(self) -> bytes:
        begun = None if self._begun is None else asdict(self._begun)
        return json.dumps({"archive": self._url, "verified": self.verified, "pass": begun}).encode()

    def _load(self, content: bytes) -> None:
        """Read what an earlier pass wrote to the progress file: version and put id up to which the chain of commits is
        verified, and the interrupted pass, if any. Raises UsageError if it is no such file, or of another archive."""
        try:
            document: dict[str, Any] = json.loads(content)
            url, (version, put_id), begun = document["archive"], document["verified"], document["pass"]
            self.verified = int(version), str(put_id)
            if begun is not None:
                anomalies = [_anomaly(**anomaly) for anomaly in begun["anomalies"]]
                # JSON has lists in place of tuples.
                self._begun = replace(
                    VerifyPass(**begun),
                    chain=tuple(begun["chain"]),
                    checked=tuple(begun["checked"]),
                    anomalies=anomalies,
                )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"the file given for the verification of {self._url} is not a progress file of tiered verify",
                hint="name another file",
            ) from error
        if url != self._url:
            raise UsageError(
                f"this progress file of tiered verify belongs to the archive {url}, not to {self._url}",
                hint="name another file",
            )


def _anomaly(kind: str, key: str, range: list[int] | None, detail: str) -> Anomaly:
    return Anomaly(AnomalyKind(kind), key, None if range is None else (range[0], range[1]), detail)


@dataclass
class VerifyReport:
    """What a verification found. ``leftovers``: keys of objects that nothing names, which only take space. ``counts``:
    what was checked, by kind, and as ``without_key`` the objects of which only checksums were, because their encryption
    keys, ``lacking_keys``, are not here. ``unchecked``: objects that could not be read now, with the reason."""

    anomalies: list[Anomaly] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    lacking_keys: list[str] = field(default_factory=list)

    def add(self, kind: AnomalyKind, key: str, detail: str) -> None:
        """Record an anomaly of a whole object."""
        self.anomalies.append(Anomaly(kind, key, None, detail))

    @contextmanager
    def by_checksums_without_key(self) -> Iterator[None]:
        """If the ``with`` block ends because an encryption key is not here, checks the checksums of the object's stored
        bytes instead, and counts it. Raises CorruptionError if they are wrong."""
        try:
            yield
        except EncryptionKeyError as error:
            error.check()
            self.counts["without_key"] = self.counts.get("without_key", 0) + 1
            self.lack(error.lacks)

    def lack(self, key: str) -> None:
        """Note the name of an encryption key that is not here; empty: none."""
        if key and key not in self.lacking_keys:
            self.lacking_keys.append(key)

    def exit_code(self, *, strict: bool, has_ring: bool) -> int:
        """The exit code of the command: 1 for anomalies, with ``strict`` also for leftovers; else 4 if something could
        not be read now; else 2 if the command has a key ring and this lacks a key; else 0."""
        if self.anomalies or (strict and self.leftovers):
            return 1
        if self.unchecked:
            return UnavailableError.exit_code
        return EncryptionKeyError.exit_code if has_ring and self.counts.get("without_key") else 0

    def joined(self, found: Sequence[Anomaly]) -> VerifyReport:
        """This report with the anomalies ``found`` before the others."""
        return replace(self, anomalies=[*found, *self.anomalies])

    def lines(self, title: str) -> Iterator[str]:
        """The report as lines of text: each anomaly, each object that could not be checked, each leftover (an object
        that nothing names), then a summary that starts with ``title``, and what to do if something is wrong."""
        yield from (f"anomaly: {anomaly}" for anomaly in self.anomalies)
        yield from (f"not checked: {key}: {reason}" for key, reason in self.unchecked.items())
        yield from (f"not decrypted: {key}" for key in self.lacking_keys)
        yield from (f"leftover: {key}" for key in self.leftovers)
        counts = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        count = len(self.anomalies)
        verdict = f"{count} {'ANOMALY' if count == 1 else 'ANOMALIES'}" if count else "clean"
        limits = {"NOT CHECKED": len(self.unchecked), "BY CHECKSUMS ONLY": self.counts.get("without_key", 0)}
        verdict += "".join(f", {number:,} {what}" for what, number in limits.items() if number)
        parts = verdict, counts, f"leftovers {len(self.leftovers)}"
        yield f"{title}: {'; '.join(part for part in parts if part)}"
        if count:
            yield f"next: {REPAIR_HINT}"
