"""Damage for tests of scrub and repair."""

from tiered.object_store.interface import ObjectStore


def flip(store: ObjectStore, key: str, position: int) -> None:
    """Damage one bit of an object."""
    data = bytearray(store.get(key))
    data[position] ^= 0x10
    store.delete([key])
    store.put_if_absent(key, [bytes(data)])
