"""The order of items in an index file: by hash, then newest first, then queue, newest offset first.

Equal items are the same key of the same message.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.model.tables import Table, concatenated, picked, positions

_COLUMNS = (("hash", 1), ("store_timestamp", -1), ("queue_id", 1), ("generation", 1), ("queue_offset", -1))


def sorted_items(items: Table) -> Table:
    """``items`` in the order of an index file (by hash, then newest first), each of equal ones once."""
    order: NDArray[np.int64] = np.argsort(np.ascontiguousarray(items["hash"]))
    ordered = picked(items, order)
    is_same = ordered["hash"][1:] == ordered["hash"][:-1]
    if not is_same.any():
        return ordered
    # The other columns decide among messages of one key: only these are sorted, and not copies of one item.
    second = np.flatnonzero(is_same) + 1
    differs = picked(ordered, second) != picked(ordered, second - 1)
    of_key = np.concatenate(([0], np.cumsum(~is_same)))
    is_shared = np.zeros(of_key[-1] + 1, bool)
    is_shared[of_key[second[differs]]] = True
    shared = np.flatnonzero(is_shared[of_key])
    few = picked(ordered, shared)
    ordered[shared] = picked(few, np.lexsort([_rising(few[name], sign) for name, sign in reversed(_COLUMNS)]))
    is_new = np.ones(len(ordered), bool)
    is_new[second] = picked(ordered, second) != picked(ordered, second - 1)
    return picked(ordered, is_new)


def in_order(items: Table) -> bool:
    """Whether ``items`` are in the order of an index file, and no two equal: each is greater than the one before."""
    if len(items) < 2:
        return True
    before, after = items[:-1], items[1:]
    # The first column in which two neighbours differ decides whether they rise.
    decided = np.zeros(len(before), bool)
    rising = np.zeros(len(before), bool)
    for name, sign in _COLUMNS:
        low, high = (before[name], after[name]) if sign > 0 else (after[name], before[name])
        rising |= ~decided & (low < high)
        decided |= low != high
        if bool(decided.all()):
            break
    return bool(rising.all())


def missing_items(items: Table, wanted: Table) -> int:
    """How many different ones of ``wanted`` are not among ``items``, which are in order."""
    item_hashes = np.ascontiguousarray(items["hash"])
    # In order, so that searches find their data in the processor's cache.
    wanted = picked(wanted, np.argsort(wanted["hash"]))
    if len(item_hashes):
        first = picked(items, np.minimum(np.searchsorted(item_hashes, wanted["hash"]), len(item_hashes) - 1))
        wanted = picked(wanted, first != wanted)
    # Left are keys whose first item is that of another message. All their items are sorted together with the wanted
    # ones, and equal items dropped: what remains beyond the items is missing.
    hashes = np.unique(wanted["hash"])
    begin, end = (np.searchsorted(item_hashes, hashes, side) for side in ("left", "right"))
    same = picked(items, positions(begin, end - begin))
    return len(sorted_items(concatenated([same, wanted], items.dtype))) - len(same)


def position_after(items: Table, item: np.void) -> int:
    """How many of the sorted ``items`` are not greater than ``item``, by a binary search in each column in turn."""
    low, high = 0, len(items)
    for name, sign in _COLUMNS:
        column, wanted = _rising(items[name][low:high], sign), _rising(item[name], sign)
        low, high = (
            low + int(np.searchsorted(column, wanted, side="left")),
            low + int(np.searchsorted(column, wanted, side="right")),
        )
    return high


def _rising(values: Any, sign: int) -> Any:
    """``values`` of a column as they are, or, if ``sign`` is negative as the largest come first, with all bits
    inverted, so that they rise. Negation would not do: the least integer is its own negative, and any time may
    occur."""
    return values if sign > 0 else ~values


def item_key(item: np.void) -> tuple[int, ...]:
    """A tuple that sorts as ``item`` does."""
    return tuple(sign * int(item[name]) for name, sign in _COLUMNS)
