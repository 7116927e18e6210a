"""Sealed objects: what is stored says nothing, only what was stored is read, and errors name the missing key."""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.formats.golden_archive import GOLDEN
from tests.object_store.sealed_scene import ARCHIVE, SO, SSO, key_file, sealing
from tests.sweeps import sweep
from tiered.errors import AlreadyExistsError, CorruptionError, EncryptionKeyError, UsageError
from tiered.object_store.archive_keys import decode_key_table
from tiered.object_store.file import FileStore
from tiered.object_store.interface import GET_BYTES_MAX, FileRange, ObjectRange, Piece
from tiered.object_store.memory import MemoryStore
from tiered.object_store.sealed import (
    CHUNK_BYTES,
    STORED_BYTES,
    TRAILER_BYTES,
    LocalSeals,
    SealedStore,
    plain_size,
    sealed_size,
)
from tiered.object_store.secret_file import SecretFile, new_secret

WORD = b"a word that nobody may read "
SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 5 * CHUNK_BYTES + 77)


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    return key_file(tmp_path / "ring", "k1")


def _raw(store: MemoryStore, key: str) -> bytes:
    return store.get(f"{ARCHIVE}/{key}", GET_BYTES_MAX)


def _replace(store: MemoryStore, key: str, content: bytes) -> None:
    store.delete([f"{ARCHIVE}/{key}"])
    store.put_if_absent(f"{ARCHIVE}/{key}", [content])


def _name(store: SealedStore, key: str) -> bytes:
    return store.get(f"{ARCHIVE}/{key}", GET_BYTES_MAX)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_stored_is_read_by_any_range(ring: Path, size: int) -> None:
    inner, chance = MemoryStore("memory://m"), random.Random(size)
    content = chance.randbytes(size)
    key = f"{ARCHIVE}/{SO.format(size)}"
    sealing(inner, ring).put_if_absent(key, [content[:100], memoryview(content)[100:]])
    assert sealing(inner, ring).get(key, size) == content
    assert inner.get(key, GET_BYTES_MAX)[:64] != content[:64]
    assert plain_size(sealed_size(size)) == size == next(iter(sealing(inner, ring).list(key))).size_bytes
    reader = sealing(inner, ring)
    for number in range(60):
        # The first range that a process reads, and others.
        reader = sealing(inner, ring) if number % 3 == 0 else reader
        begin = chance.randint(0, size)
        length = chance.choice((size - begin, chance.randint(0, size - begin)))
        assert reader.get_range(key, begin, length) == content[begin : begin + length]
    with pytest.raises(CorruptionError):
        reader.get_range(key, 1, size + 1)


def test_objects_are_composed_of_objects_files_and_secret_files(
    ring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the directory that is given for it: that of temporary files may be small."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    store, secret = sealing(MemoryStore("memory://m"), ring), new_secret()
    content = random.Random(1).randbytes(3 * CHUNK_BYTES)
    store.put_if_absent(f"{ARCHIVE}/{SSO.format(1)}", [content])
    with SecretFile(tmp_path / "file", secret) as file:
        file.writelines([WORD, content, WORD])
    assert WORD not in (tmp_path / "file").read_bytes()
    pieces: list[Piece] = [
        b"head",
        ObjectRange(f"{ARCHIVE}/{SSO.format(1)}", 7, 2 * CHUNK_BYTES),
        FileRange(str(tmp_path / "file"), 5, len(content), secret),
    ]
    for number in (2, 3):
        store.compose_if_absent(f"{ARCHIVE}/{SO.format(number)}", pieces[: 5 - number], spool=str(tmp_path))
    wanted = b"head" + content[7 : 7 + 2 * CHUNK_BYTES] + (WORD + content)[5 : 5 + len(content)]
    assert _name(store, SO.format(2)) == wanted
    assert _name(store, SO.format(3)) == wanted[: 4 + 2 * CHUNK_BYTES]


def test_only_catalog_and_wrapped_keys_are_plain(ring: Path) -> None:
    inner = MemoryStore("memory://m")
    store = sealing(inner, ring)
    store.keys(ARCHIVE).begin(())
    sealed = (
        SO.format(1),
        SSO.format(1),
        "index/0-1-1_x.idx",
        "state/topics-1-1-a",
        "timer/00000000000000000001-1",
    )
    sealed += ("state/serve/00000000000000000001", "state/serve/retry/00000000000000000001", "private/key")
    plain = ("catalog/99999999999999999998", "pages/root-00000000000000000001-1-a")
    for key in (*plain, *sealed):
        store.put_if_absent(f"{ARCHIVE}/{key}", [WORD])
        assert (WORD in _raw(inner, key)) == (key in plain), key
        assert _name(store, key) == WORD
        with pytest.raises(AlreadyExistsError):
            sealing(inner, ring).put_if_absent(f"{ARCHIVE}/{key}", [WORD])


def _mutations(inner: MemoryStore, large: list[str], chance: random.Random) -> Callable[[bytes, str], bytes]:
    """A change of an object's stored bytes: a bit, a cut, chunks swapped or repeated, parts or all of another's."""

    def mutated(stored: bytes, key: str) -> bytes:
        kind = chance.randrange(7)
        other = _raw(inner, chance.choice([one for one in large if one != key]))
        chunks = [
            stored[at : at + STORED_BYTES] for at in range(0, len(stored) - TRAILER_BYTES, STORED_BYTES)
        ]
        trailer = stored[-TRAILER_BYTES:]
        if kind == 0:
            at = chance.randrange(len(stored) - TRAILER_BYTES - 4)
            return stored[:at] + bytes([stored[at] ^ 1 << chance.randrange(8)]) + stored[at + 1 :]
        if kind == 1:
            return stored[: chance.randrange(len(stored))]
        if kind == 2:
            return other
        if kind == 3:
            return stored[:-TRAILER_BYTES] + other[-TRAILER_BYTES:]
        if kind == 4:
            return other[: len(stored) - TRAILER_BYTES] + trailer
        if kind == 5:
            first, second = chance.randrange(2), chance.randrange(2)
            chunks[0], chunks[1] = chunks[first], chunks[second]
            return (
                b"".join(chunks) + trailer if (first, second) != (0, 1) else b"".join(chunks[:-1]) + trailer
            )
        return b"".join(chunks[:-1]) + trailer[:16] + (2 * CHUNK_BYTES).to_bytes(8, "little") + trailer[24:]

    return mutated


@pytest.mark.parametrize("cases", sweep([5_000, 100_000], fast=[5_000]))
def test_swapped_moved_cut_and_replayed_bytes_are_refused(cases: int, ring: Path) -> None:
    """Between objects, queues and archives: never other bytes, always a typed error."""
    inner, chance = MemoryStore("memory://m"), random.Random(3)
    writer, keys = sealing(inner, ring), [SO.format(number) for number in range(4)]
    keys += [key.replace("/orders/0/1/", "/orders/0/2/") for key in keys]
    for key in keys:
        writer.put_if_absent(f"{ARCHIVE}/{key}", [chance.randbytes(2 * CHUNK_BYTES + 99)])
    mutated = _mutations(inner, keys, chance)
    originals = {key: _raw(inner, key) for key in keys}
    reader, refused = sealing(inner, ring), 0
    small = chance.randbytes(64)
    writer.put_if_absent(f"{ARCHIVE}/{SSO.format(0)}", [small])
    stored = _raw(inner, SSO.format(0))
    for number in range(cases):
        if number % 50 == 0:  # a whole object of several chunks
            key = chance.choice(keys)
            _replace(inner, key, mutated(originals[key], key))
            with pytest.raises(CorruptionError):
                _name(sealing(inner, ring) if number % 500 == 0 else reader, key)
            _replace(inner, key, originals[key])
        else:  # an object of one chunk: moved to another place, or with other bytes
            key = SSO.format(number)
            at = chance.randrange(len(stored) - TRAILER_BYTES - 4)
            changed = bytearray(stored)
            changed[at] ^= (number % 3 > 0) << chance.randrange(8)
            inner.put_if_absent(f"{ARCHIVE}/{key}", [bytes(changed)])
            try:
                reader.get_range(f"{ARCHIVE}/{key}", 3, 61)
            except CorruptionError:
                refused += 1
            inner.delete([f"{ARCHIVE}/{key}"])
    assert refused == cases - cases // 50
    assert all(_name(sealing(inner, ring), key) for key in keys)


def test_an_object_under_a_key_that_the_archive_lacks_is_refused_and_not_called_damaged(ring: Path) -> None:
    """As of another archive of the same names and ring, or once an older table of keys was put back."""
    stores = [MemoryStore("memory://m"), MemoryStore("memory://n")]
    for store in stores:
        sealing(store, ring).put_if_absent(f"{ARCHIVE}/{SO.format(1)}", [WORD])
    _replace(stores[0], SO.format(1), _raw(stores[1], SO.format(1)))
    with pytest.raises(EncryptionKeyError, match="has no key") as caught:
        _name(sealing(stores[0], ring), SO.format(1))
    assert "put the objects of keys/ back" in caught.value.hint
    caught.value.check()


def test_without_a_ring_checksums_are_checked_and_the_key_is_named(ring: Path) -> None:
    inner = MemoryStore("memory://m")
    sealing(inner, ring).put_if_absent(f"{ARCHIVE}/{SO.format(1)}", [WORD * 10_000])
    reader = sealing(inner, None)
    for attempt in (reader.get, reader.get_range):
        with pytest.raises(EncryptionKeyError, match="k1") as caught:
            attempt(f"{ARCHIVE}/{SO.format(1)}", *((GET_BYTES_MAX,) if attempt == reader.get else (0, 5)))
        assert caught.value.exit_code == 2
        caught.value.check()
    with pytest.raises(EncryptionKeyError, match="k1"):
        reader.put_if_absent(f"{ARCHIVE}/{SO.format(2)}", [WORD])
    with pytest.raises(EncryptionKeyError, match="k1") as caught:
        reader.keys(ARCHIVE).begin(())
    caught.value.check()  # of no object
    assert [info.size_bytes for info in reader.list(f"{ARCHIVE}/data/")] == [len(WORD) * 10_000]
    stored = bytearray(_raw(inner, SO.format(1)))
    stored[STORED_BYTES + 5] ^= 1
    _replace(inner, SO.format(1), bytes(stored))
    with pytest.raises(EncryptionKeyError) as caught:
        _name(sealing(inner, None), SO.format(1))
    with pytest.raises(CorruptionError, match="chunk 1"):
        caught.value.check()


def test_an_archive_is_encrypted_from_its_beginning_or_never(ring: Path) -> None:
    inner = MemoryStore("memory://m")
    sealing(inner, None).put_if_absent(f"{ARCHIVE}/catalog/99999999999999999998", [b"commit"])
    with pytest.raises(UsageError, match="without encryption"):
        sealing(inner, ring).keys(ARCHIVE).begin(())
    with pytest.raises(UsageError, match="without encryption"):
        _name(sealing(inner, ring), SO.format(1))
    with pytest.raises(UsageError, match="nothing is encrypted"):
        sealing(inner, None).keys(ARCHIVE).begin((("orders", "k"),))


def test_lost_keys_are_not_taken_for_an_archive_without_encryption(ring: Path) -> None:
    inner = MemoryStore("memory://m")
    sealing(inner, ring).put_if_absent(f"{ARCHIVE}/{SO.format(1)}", [WORD])
    inner.delete([info.key for info in inner.list(f"{ARCHIVE}/keys/")])
    with pytest.raises(UsageError, match="its keys are lost") as caught:
        sealing(inner, ring).put_if_absent(f"{ARCHIVE}/{SO.format(2)}", [WORD])
    assert "put the objects of keys/ back" in caught.value.hint
    assert [info.key for info in inner.list("")] == [f"{ARCHIVE}/{SO.format(1)}"]


def test_rotating_and_rewrapping_change_no_object(tmp_path: Path) -> None:
    """Old and new rings, one in the middle of a rotation, and the old key destroyed."""
    inner, old = MemoryStore("memory://m"), key_file(tmp_path / "old", "k1")
    sealing(inner, old).put_if_absent(f"{ARCHIVE}/{SO.format(1)}", [WORD])
    both, new = key_file(tmp_path / "both", "k1", "k2"), key_file(tmp_path / "new", "k2")
    sealing(inner, both).put_if_absent(f"{ARCHIVE}/{SO.format(2)}", [WORD])
    with pytest.raises(EncryptionKeyError, match="key k2 is not in"):
        _name(sealing(inner, old), SO.format(2))
    with pytest.raises(EncryptionKeyError, match="key k1 is not in"):
        _name(sealing(inner, new), SO.format(1))
    before = {info.key: inner.get(info.key, GET_BYTES_MAX) for info in inner.list(f"{ARCHIVE}/")}
    sealing(inner, both).keys(ARCHIVE).rewrap({"k1"}, "k2")
    after = {info.key: inner.get(info.key, GET_BYTES_MAX) for info in inner.list(f"{ARCHIVE}/")}
    assert {key: after[key] for key in before} == before
    assert [key.split("/")[2] for key in after.keys() - before.keys()] == ["keys"]
    assert _name(sealing(inner, new), SO.format(1)) == _name(sealing(inner, new), SO.format(2)) == WORD
    with pytest.raises(EncryptionKeyError, match="k2"):
        sealing(inner, key_file(tmp_path / "wrong", "k2", seed=2)).keys(ARCHIVE).check()


def test_a_topic_with_a_key_of_its_own_is_lost_with_it_alone(tmp_path: Path) -> None:
    inner, both = MemoryStore("memory://m"), key_file(tmp_path / "both", "orders-key", "k1")
    writer, topics = sealing(inner, both), (("orders*", "orders-key"), ("*", ""))
    writer.keys(ARCHIVE).begin(topics)
    writer.keys(ARCHIVE).own(topics)
    other = SO.format(1).replace("orders", "payments")
    for key in (SO.format(1), other, SSO.format(1)):
        writer.put_if_absent(f"{ARCHIVE}/{key}", [WORD])
    kept = LocalSeals(writer.keys(ARCHIVE)).seal(SO.format(1), WORD)
    without = sealing(inner, key_file(tmp_path / "left", "k1"))
    without.keys(ARCHIVE).check()
    with pytest.raises(EncryptionKeyError, match="orders-key") as caught:
        _name(without, SO.format(1))
    assert SO.format(1) in caught.value.message
    assert _name(without, other) == _name(without, SSO.format(1)) == WORD
    assert LocalSeals(without.keys(ARCHIVE)).open(SO.format(1), kept) == b""
    assert LocalSeals(without.keys(ARCHIVE)).seal(SO.format(1), WORD) == b""
    # Rewrapping leaves it alone, unless it is named.
    sealing(inner, both).keys(ARCHIVE).rewrap({"k1"}, "k1")
    newest = next(iter(inner.list(f"{ARCHIVE}/keys/"))).key
    table = decode_key_table(inner.get(newest, GET_BYTES_MAX), newest)
    assert [(one.ring_key, one.is_topics) for one in table.keys] == [("k1", False), ("orders-key", True)]


def test_two_processes_that_make_keys_at_once_use_the_keys_of_both(ring: Path) -> None:
    inner = MemoryStore("memory://m")
    first, second = sealing(inner, ring), sealing(inner, ring)
    first.keys(ARCHIVE).add("k1")
    assert second.keys(ARCHIVE).table().version == 1
    first.keys(ARCHIVE).add("k1")
    second.keys(ARCHIVE).add("k1")
    second.put_if_absent(f"{ARCHIVE}/{SO.format(1)}", [WORD])
    assert len(first.keys(ARCHIVE).table(is_new=True).keys) == 3
    assert _name(first, SO.format(1)) == WORD


def test_local_copies_are_sealed(ring: Path) -> None:
    inner = MemoryStore("memory://m")
    writer = sealing(inner, ring)
    writer.put_if_absent(f"{ARCHIVE}/{SO.format(1)}", [WORD])
    sealed = LocalSeals(writer.keys(ARCHIVE)).seal(SO.format(1), WORD)
    again = LocalSeals(sealing(inner, ring).keys(ARCHIVE))
    assert WORD not in sealed
    assert again.open(SO.format(1), sealed) == WORD
    assert again.open(SO.format(2), sealed) == again.open(SO.format(1), sealed[:-1]) == b""
    assert again.open(SO.format(1), b"") == b""


def test_the_golden_sealed_archive_is_read(tmp_path: Path) -> None:
    """Written by the first version that sealed."""
    store = sealing(FileStore(GOLDEN / "1.0" / "sealed"), key_file(tmp_path / "ring", "k1"))
    assert _name(store, SO.format(1)) == bytes(range(256)) * 130
    assert _name(store, "state/topics-1-1-a") == b"a table"
    assert store.keys(ARCHIVE).table().topics == (("orders", "k1"),)
