"""Loading settings: precedence, units, and every way to be wrong with the message a user gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tiered.errors import AccessDeniedError, NotFoundError, UnavailableError, UsageError
from tiered.settings.load import FIELDS, changed_keys, flag_assignments, load_settings, value_of
from tiered.settings.sections import SECTIONS, UNSUPPORTED, Settings

MIB = 1024 * 1024


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tiered.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_documented_ones() -> None:
    settings = load_settings().settings
    assert settings == Settings()
    assert settings.offload.batch_bytes == 32 * MIB
    assert settings.offload.batch_age_ms == 5_000
    assert settings.offload.root_every == 64
    assert settings.admin.host == "127.0.0.1"


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = _file(tmp_path, '[offload]\nbatch_bytes = "1MiB"\nupload_threads = 3\nbatch_age_ms = "2s"\n')
    loaded = load_settings(
        path,
        environment={"TIERED_OFFLOAD__BATCH_BYTES": "2MiB", "TIERED_OFFLOAD__BATCH_AGE_MS": "3s"},
        flags=flag_assignments(["offload.batch_bytes=3MiB"]),
    )
    offload = loaded.settings.offload
    assert (offload.batch_bytes, offload.batch_age_ms, offload.upload_threads) == (3 * MIB, 3_000, 3)
    assert loaded.origins["offload.batch_bytes"] == "--set offload.batch_bytes"
    assert loaded.origins["offload.batch_age_ms"] == "TIERED_OFFLOAD__BATCH_AGE_MS"
    assert loaded.origins["offload.upload_threads"] == str(path)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = _file(tmp_path, '[archive]\nurl = "file:///archive"\n')
    assert load_settings(environment={"TIERED_CONFIG": str(path)}).settings.archive.url == "file:///archive"


def test_variables_injected_for_a_service_named_tiered_are_not_settings() -> None:
    environment = {
        "TIERED_PORT": "tcp://10.0.0.1:80",
        "TIERED_SERVICE_HOST": "10.0.0.1",
        "TIERED_ADMIN_PORT": "tcp://10.0.0.1:80",  # of a service named tiered-admin
    }
    assert load_settings(environment=environment).settings == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("65536", 65536),
        ("64KiB", 65536),
        ("64k", 65536),
        ("0.5MiB", 524288),
        ("1_000_000", 1_000_000),
        ("1MB", 10**6),
    ],
)
def test_sizes_may_be_written_with_units(text: str, expected: int) -> None:
    assert (
        load_settings(flags={"offload.batch_bytes": ("flag", text)}).settings.offload.batch_bytes == expected
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("250", 250), ("250ms", 250), ("2s", 2000), ("1h", 3_600_000)]
)
def test_times_may_be_written_with_units(text: str, expected: int) -> None:
    assert (
        load_settings(flags={"offload.batch_age_ms": ("flag", text)}).settings.offload.batch_age_ms
        == expected
    )


@pytest.mark.parametrize("text", ["orders-*, payments", '["orders-*", "payments"]'])
def test_lists_may_be_text(text: str) -> None:
    assert load_settings(environment={"TIERED_TOPICS__INCLUDE": text}).settings.topics.include == (
        "orders-*",
        "payments",
    )


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("offload.batch_bytes", "many", "32MiB"),
        ("offload.batch_bytes", 1.5, "whole number of bytes"),
        ("offload.batch_bytes", True, "whole number of bytes"),
        ("offload.batch_bytes", "9" * 400, "whole number of bytes"),
        ("offload.memory_budget_bytes", 10**400, f"at most {1 << 53}"),
        ("gc.grace_ms", str((1 << 63) - 1), "at most 3162240000000"),
        ("offload.batch_age_ms", "30d", "from 1 to 3600000"),
        ("retention.max_share", 10**400, "use a number"),
        ("topics.include", "[" * 100_000, "list of strings"),
        ("offload.batch_bytes", "10s", "whole number of bytes"),
        ("offload.batch_bytes", "-1", "whole number of bytes"),
        ("offload.batch_bytes", -1, "a value from 65536 to 1073741824"),
        ("offload.batch_age_ms", "10MiB", "milliseconds"),
        ("offload.upload_threads", "4 threads", "a whole number"),
        ("offload.upload_threads", 65, "from 1 to 64"),
        ("offload.memory_budget_bytes", 64 * MIB, "at least 3 × offload.batch_bytes"),
        ("retention.max_share", "nan", "from 0 to 1"),
        ("pins.enabled", "maybe", "true or false"),
        ("process.log_level", "loud", "debug, info, warning, error"),
        ("topics.include", [1], "list of strings"),
        ("archive.url", 5, "use text"),
        ("retention.ttl", "7", "12h"),
        ("retention.ttl", "0d", "12h"),
        ("retention.ttl", "200000d", "forever"),
        ("retention.min_archived", "forever", "3d"),
        ("retention.max_share", 1.5, "from 0 to 1"),
        ("topics.rules", "orders-*=7d", "[[topics.rules]]"),
        ("topics.rules", {"pattern": "a"}, "[[topics.rules]]"),
        ("topics.rules", [{"ttl": "7d"}], "rule 1: set pattern"),
        ("topics.rules", [{"pattern": "a"}], "rule 1 sets nothing"),
        (
            "topics.rules",
            [{"pattern": "a", "ttl": "7d"}, {"pattern": "b", "tll": "7d"}],
            "did you mean ttl?",
        ),
        ("topics.rules", [{"pattern": "a", "ttl": 7}], "rule 1, ttl: use a time with its unit"),
        ("topics.rules", [{"pattern": "a", "max_bytes": 0}], "rule 1, max_bytes: use a whole number"),
        ("topics.rules", [{"pattern": "a", "read_policy": "x"}], "rule 1, read_policy: use one of"),
        ("broker.tls_verify", "some", "full, ca, none"),
        ("broker.tls_ca", "/ca.pem", "requires broker.tls = true"),
        ("broker.tls_key", "/own.key", "requires broker.tls = true"),
        ("broker.address", "localhost", "write host:port"),
        ("broker.address", "localhost:65536", "write host:port"),
        ("broker.address", "localhost:" + "9" * 5000, "write host:port"),
        ("broker.name_servers", "10.0.0.1:9876, 10.0.0.2", "write host:port"),
        ("serve.bind", "", "write host:port"),
        ("serve.advertise", ":9876", "write host:port"),
        ("slave.bind", "10931", "write host:port"),
        ("serve.tls_only", "true", "requires serve.tls_certificate"),
        ("serve.proxy_from", "10.0.0.0/8, load-balancer", "10.0.0.0/24"),
        ("serve.proxy_from", "10.0.0.8/8", "10.0.0.0/24"),
        ("serve.tls_key_password_file", "/password", "requires serve.tls_certificate"),
    ],
)
def test_invalid_values_name_key_origin_and_fix(key: str, value: Any, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(flags={key: ("the-origin", value)})
    message = str(caught.value)
    assert key in message and "the-origin" in message and fix in message
    assert caught.value.exit_code == 2 and "\n" not in message


def test_client_certificates_that_clients_without_tls_need_not_show_are_refused() -> None:
    given = ["serve.tls_certificate=/c.pem", "serve.tls_client_ca=/ca.pem"]
    with pytest.raises(
        UsageError, match=r"serve\.tls_only = false .*serve\.tls_client_required has no effect"
    ):
        load_settings(flags=flag_assignments(given))
    for way_out in ("serve.tls_only=true", "serve.tls_client_required=false"):
        load_settings(flags=flag_assignments([*given, way_out]))


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(UsageError, match=r"broker.tls_key .*requires broker.tls_certificate"):
        load_settings(flags=flag_assignments(["broker.tls=true", "broker.tls_key=/own.key"]))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("offload.batch_byte", "did you mean offload.batch_bytes?"),
        ("archive.state_dir", "did you mean process.state_dir?"),
        ("offload.zzzzzzzz", "[offload] has batch_bytes"),
        ("offload.block_bytes", "did you mean offload.batch_bytes?"),
        ("prefetch.memory_bytes", "fetch.memory_bytes"),
        ("zzzzzzz.qqqqqqqq", "the sections are broker"),
    ],
)
def test_unknown_settings_are_refused_with_a_suggestion(key: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(flags={key: ("the-origin", 1)})
    assert f"{key} (the-origin) is not a setting" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("key", ["encryption.key", "offload.dictionary"])
def test_unsupported_settings_are_refused(key: str) -> None:
    with pytest.raises(UsageError, match="is not supported"):
        load_settings(flags={key: ("flag", "30d")})


def test_unsupported_settings_do_not_exist() -> None:
    assert not set(UNSUPPORTED) & set(FIELDS)
    assert not set(UNSUPPORTED) & set(SECTIONS)


def test_an_unknown_section_and_variable_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"archives\.url .* is not a setting"):
        load_settings(_file(tmp_path, '[archives]\nurl = "x"\n'))
    with pytest.raises(UsageError, match="TIERED_OFFLOAD__BATCH"):
        load_settings(environment={"TIERED_OFFLOAD__BATCH": "1"})
    with pytest.raises(UsageError, match="not in a section"):
        load_settings(_file(tmp_path, 'url = "x"\n'))
    with pytest.raises(UsageError, match="not supported"):
        load_settings(_file(tmp_path, "[encryption]\n"))


def test_a_variable_with_one_underscore_is_not_ignored() -> None:
    with pytest.raises(UsageError, match="TIERED_ARCHIVE_URL is not read; write TIERED_ARCHIVE__URL"):
        load_settings(environment={"TIERED_ARCHIVE_URL": "file:///archive"})


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"missing\.toml"):
        load_settings(tmp_path / "missing.toml")
    with pytest.raises(UsageError, match="is not valid TOML"):
        load_settings(_file(tmp_path, "[offload\n"))
    with pytest.raises(AccessDeniedError):
        load_settings(tmp_path)
    with pytest.raises(UsageError, match="has no value"):
        flag_assignments(["offload.batch_bytes"])


def test_a_file_that_the_disk_does_not_give_is_not_the_end(tmp_path: Path) -> None:
    """A reload keeps the old settings for every TieredError; anything else would end the process."""
    path = _file(tmp_path, "")
    with pytest.raises(UnavailableError, match="cannot read"):
        load_settings(path / "below")


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "x = " + "9" * 5_000, "x = '\xff'"])
def test_a_file_without_an_end_of_nesting_or_digits_is_not_the_end(text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="is not valid TOML"):
        load_settings(path)


@pytest.mark.parametrize("variable", ["TIERED__ADDRESS", "TIERED___", "TIERED_BROKER__"])
def test_a_variable_that_names_no_section_or_no_setting_is_refused(variable: str) -> None:
    with pytest.raises(UsageError, match=rf"\({variable}\) is not a setting"):
        load_settings(environment={variable: "x"})


def test_changed_keys_lists_differences() -> None:
    after = load_settings(flags={"topics.exclude": ("flag", "a,b"), "admin.port": ("flag", 0)}).settings
    assert changed_keys(Settings(), after) == ["topics.exclude", "admin.port"]
    assert value_of(after, "topics.exclude") == ("a", "b")


def test_every_setting_has_a_meaning_and_a_valid_default() -> None:
    assert {item.name for item in dataclasses.fields(Settings)} == {*SECTIONS, "prefetch"}
    for key, item in FIELDS.items():
        assert item.rule.meaning, key
        assert load_settings(flags={key: ("flag", item.default)}).settings == Settings()


def test_the_caches_follow_the_limit_of_memory() -> None:
    fetch = load_settings(flags={"fetch.memory_bytes": ("--set", "64MiB")}).settings.fetch
    assert [size >> 20 for size in (fetch.cache_bytes, fetch.index_cache_bytes)] == [32, 8]
    assert fetch.query_cache_bytes == 8 * MIB
