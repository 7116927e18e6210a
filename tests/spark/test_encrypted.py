"""Spark reads an encrypted archive as a plain one, and names the key that it lacks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.message_table.options.source_options import SOURCE_NAME
from tests.object_store.sealed_scene import key_file
from tests.sweeps import sweep


@pytest.mark.parametrize("name", sweep(["K", "H2", "E"], fast=["K"], rest="integration"))
def test_an_encrypted_archive_is_read_as_a_plain_one(
    name: str,
    spark: SparkSession,
    run: Callable[..., tuple[int, str, str]],
    real_store: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    ring, pack = str(key_file(tmp_path / "ring", "k1")), real_store(name)
    found = []
    for kind, key_ring in (("plain", ""), ("sealed", ring)):
        url = f"file://{tmp_path / kind}"
        arguments = ("--broker-conf", pack / "broker.conf", "--set", f"object_store.key_ring={key_ring}")
        assert run("backfill", pack / "store", url, *arguments)[0] == 0
        reader = spark.read.format(SOURCE_NAME).option("path", url)
        rows = (reader.option("keyRing", key_ring) if key_ring else reader).load()
        found.append(sorted(map(str, rows.collect())))
    assert found[0] == found[1] and found[0]
    with pytest.raises(Exception, match="is encrypted with k1"):
        spark.read.format(SOURCE_NAME).option("path", url).load().count()
