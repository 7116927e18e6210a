"""What an archive costs: prices, the measured use, and the projection, with amounts worked out by hand."""

from pathlib import Path

import pytest

from rocketmq_tiered.maintenance.cost import (
    DAY_MS,
    GIB,
    ArchiveUse,
    PartSizes,
    Prices,
    RequestCounts,
    Use,
    batch_age_costs,
    measure,
    month_cost,
    prices_of,
    read_prices,
    storage_in_a_year,
    topic_costs,
    ttl_costs,
)
from tiered.errors import NotFoundError, UsageError
from tiered.formats.keys import catalog_key, data_key, index_key, set_key
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectInfo

MIB = 1 << 20
NOW_MS = 1_763_900_000_000
PARTS = PartSizes(64 * MIB, 16 * MIB)
PRICES = Prices(storage_gib_month=0.02, put_1000=0.005, get_1000=0.0004, list_1000=0.005, read_gib=0.01)


def written(use: dict[str, Use], days: float = 1.0, stored: dict[str, Use] | None = None) -> ArchiveUse:
    return ArchiveUse(stored or use, use, {}, days)


# -- prices -------------------------------------------------------------------


def test_amounts() -> None:
    assert PRICES.storage(100 * GIB) == pytest.approx(2.0)
    assert PRICES.storage(100 * GIB, days=15) == pytest.approx(1.0)
    assert PRICES.requests(puts=1e6, gets=1e6, lists=1000) == pytest.approx(5 + 0.4 + 0.005)
    assert PRICES.reads(50 * GIB) == pytest.approx(0.5)


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('name = "MinIO"\nstorage_gib_month = 0.004\nput_1000 = 0\n')
    prices = read_prices(path)
    assert (prices.name, prices.storage_gib_month, prices.put_1000) == ("MinIO", 0.004, 0)
    assert prices.get_1000 == Prices().get_1000
    for text, says in (
        ("puts = 1", "puts is not the name of a price; the names of prices are name, date"),
        ('put_1000 = "a"', "write a number"),
        ("put_1000 = -1", "write a number"),
        ("put_1000 = inf", "write a number"),
        ("put_1000 = true", "write a number"),
        ("name = 1", "is not text"),
        ("a = = b", "is not valid TOML"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=says):
            read_prices(path)
    with pytest.raises(NotFoundError, match="--prices"):
        read_prices(tmp_path / "absent")
    assert prices_of({}, "x") == Prices()


# -- what is measured ---------------------------------------------------------


def test_objects_are_counted_by_kind_and_topic_and_by_age() -> None:
    old_ms, new_ms = NOW_MS - 30 * DAY_MS, NOW_MS - DAY_MS
    own = data_key(QueueKey("%RETRY%g", 0, 0), 0, epoch=1, attempt=1)
    listing = [
        ObjectInfo(catalog_key(1), 1_000, old_ms),
        ObjectInfo(catalog_key(2), 1_000, new_ms),
        ObjectInfo(own, 100 * MIB, new_ms),
        ObjectInfo(set_key("b_1", 1, 2), 5_000, old_ms),
        ObjectInfo("doctor/x/small.check", 7, old_ms),
    ]
    use = measure(listing, NOW_MS, PARTS)
    assert use.stored_objects == 5 and use.stored_bytes == 100 * MIB + 7_007
    assert use.observed_days == 7
    assert use.commits_a_day == pytest.approx(1 / 7)
    assert use.puts_a_day == pytest.approx((1 + 2 + 7) / 7), "100 MiB are 7 parts, a start and an end"
    assert use.bytes_a_day == pytest.approx((100 * MIB + 1_000) / 7)
    assert {topic: one.bytes for topic, one in use.topics.items()} == {"%RETRY%g": 100 * MIB}
    assert use.stored[""].objects == 1


def test_an_archive_is_measured_over_its_age_and_has_no_rate_in_its_first_hour() -> None:
    counts = RequestCounts(7200, {"get": 60_000}, 0, GIB)
    for age_ms, is_young in ((2 * DAY_MS, False), (3_700_000, False), (600_000, True)):
        use = measure([ObjectInfo(catalog_key(1), GIB, NOW_MS - age_ms)], NOW_MS, PARTS)
        assert use.observed_days == pytest.approx(age_ms / DAY_MS) and use.is_young is is_young
        month = month_cost(use, PRICES, counts)
        assert (month.puts is None, month.gets is None) == (is_young, is_young)
        assert (month.total == pytest.approx(0.02)) is is_young
        just_started = month_cost(use, PRICES, RequestCounts(60, {"get": 60_000}, 0, GIB))
        assert just_started.gets is None and just_started.reads is None
    assert measure([], NOW_MS, PARTS).puts_a_day == 0


# -- the projection -----------------------------------------------------------


def test_a_month_at_present_rates() -> None:
    use = written({"sets/": Use(1000, 10 * GIB, 1000)}, stored={"sets/": Use(9000, 850 * GIB, 9000)})
    month = month_cost(use, PRICES, None)
    assert month.storage == pytest.approx(1000 * 0.02), "850 GiB, and 300 more at the end"
    assert month.puts == pytest.approx(0.15)
    assert (month.gets, month.lists, month.reads) == (None, None, None)
    assert month.total == pytest.approx(20.15)
    counts = RequestCounts(
        43_200, {"get": 500, "get_range": 500, "list": 900, "clock": 100, "put": 9}, 1, 2 * GIB
    )
    month = month_cost(use, PRICES, counts)
    assert month.gets == pytest.approx(60_000 * 0.0004 / 1000)
    assert month.lists == pytest.approx(60_000 * 0.005 / 1000)
    assert month.reads == pytest.approx(120 * 0.01)


def test_objects_of_many_queues_are_divided_by_message_bytes() -> None:
    """Compressed to a half: 100 of the 300 stored bytes are an object of topic own, with 200 of its 400 bytes."""
    use = ArchiveUse({"sets/": Use(1, 200, 1)}, {}, {"own": Use(1, 100, 1)}, 1.0)
    costs = {one.topic: one for one in topic_costs(use, {"own": (4, 400), "other": (2, 200)}, PRICES)}
    assert costs["own"].stored_bytes == 100 + 100 and costs["other"].stored_bytes == 100
    assert (costs["own"].objects, costs["other"].objects) == (1, 0)
    assert topic_costs(ArchiveUse(), {"empty": (0, 0)}, PRICES)[0].stored_bytes == 0
    assert [one.topic for one in topic_costs(use, {}, PRICES)] == ["own"]


def test_what_a_ttl_changes() -> None:
    use = written({"sets/": Use(1, 10 * GIB, 1)})
    assert {one.value: one.month for one in ttl_costs(use, PRICES)}[30] == pytest.approx(6.0)
    assert storage_in_a_year(use, PRICES) == pytest.approx(3660 * 0.02)


def test_what_a_longer_batch_age_changes() -> None:
    """A commit each 5 s with one object: half of the PUTs are commits; index files do not depend on cycles."""
    index = index_key(0, 1, 1, "x").split("/")[0] + "/"
    use = written(
        {
            "catalog/": Use(17_280, 1, 17_280),
            "sets/": Use(17_280, 1, 17_280),
            index: Use(10, 1, 10),
        }
    )
    costs = {one.value: one.month for one in batch_age_costs(use, PRICES, 5_000, 100)}
    assert list(costs) == [15_000, 60_000, 300_000]
    assert costs[60_000] == pytest.approx((1_440 * 2 + 10) * 30 * 0.005 / 1000)
    least = {one.value: one.month for one in batch_age_costs(use, PRICES, 5_000, 10_000)}
    assert least[300_000] == pytest.approx((10_000 * 2 + 10) * 30 * 0.005 / 1000), "batches that are full"
    assert all(one.month == 0 for one in batch_age_costs(ArchiveUse(), PRICES, 5_000, 0))
