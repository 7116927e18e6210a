"""Loading settings: precedence, units, and every way to be wrong with the message a user gets.

The configuration to copy from docs/THREATS.md: loaded by the program's own readers, and used by its servers.
"""

import asyncio
import dataclasses
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.server.listen.options import server_options
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.security.rules import read_rules
from rocketmq_tiered.server.wire.listener import Listener
from rocketmq_tiered.server.wire.request import Authorizer, HandlerTable, Request, Response
from tests.server.serving_peer import RecordingPeer
from tiered.errors import AccessDeniedError, NotFoundError, TieredError, UnavailableError, UsageError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode
from tiered.remoting.credentials import Credentials, signature_of
from tiered.remoting.tls import ClientTls, TlsOptions
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


@pytest.mark.parametrize("key", ["offload.dictionary"])
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
    with pytest.raises(UsageError, match="stands outside of any section"):
        load_settings(_file(tmp_path, 'url = "x"\n'))


def test_a_variable_with_one_underscore_is_not_ignored() -> None:
    with pytest.raises(
        UsageError, match="TIERED_ARCHIVE_URL names no setting; did you mean TIERED_ARCHIVE__URL"
    ):
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


DOCUMENT = (Path(__file__).parents[2] / "docs" / "THREATS.md").read_text("utf-8")
SECRET = "CHANGE-ME-2"
PULL = {"consumerGroup": "billing", "topic": "orders", "queueId": "0"}


def block(language: str) -> str:
    """The only code block of ``language``."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """As written, with files of this test at the places it names."""
    words = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=sidecar -keyout sidecar.key"
    )
    subprocess.run(
        ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", "sidecar.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    (tmp_path / "ca.pem").write_bytes((tmp_path / "sidecar.pem").read_bytes())
    (tmp_path / "plain_acl.yml").write_text(block("yaml"))
    (tmp_path / "tiered.toml").write_text(block("toml").replace("/etc/rocketmq-tiered", str(tmp_path)))
    loaded = load_settings(tmp_path / "tiered.toml").settings
    return replace(loaded, serve=replace(loaded.serve, bind="127.0.0.1:0"))


def test_the_settings_load_without_a_complaint(settings: Settings) -> None:
    serve, broker = settings.serve, settings.broker
    assert serve.tls_only and serve.tls_client_required and serve.tls_client_ca and serve.acl_file
    assert not serve.proxy_from and not settings.object_store.trusted_network
    assert broker.tls and broker.tls_verify == "full" and broker.credentials_file
    assert settings.admin.host == "127.0.0.1" and not settings.admin.host_names
    assert settings.archive.url.startswith("s3://") and not settings.object_store.endpoint_url


def refusal(
    authorizer: Authorizer, account: str, secret: str, code: int = 11, **fields: str
) -> Response | None:
    fields = {"AccessKey": account, **PULL, **fields}
    fields["Signature"] = signature_of(fields, b"", secret)
    return authorizer.refusal(Request(RemotingCommand(code, 1, ext_fields=fields), RecordingPeer()))


def test_the_rules_give_each_account_its_own_only(settings: Settings) -> None:
    authorizer = server_options(settings.serve).authorizer
    assert isinstance(authorizer, RulesAuthorizer)
    assert refusal(authorizer, "billing-consumer", SECRET) is None
    for account, secret, fields in (
        ("billing-consumer", SECRET, {"topic": "payments"}),
        ("billing-consumer", SECRET, {"consumerGroup": "audit"}),
        ("billing-consumer", "wrong", {}),
        ("tiered-sidecar", "CHANGE-ME-1", {}),
        ("unknown-account", "", {}),
    ):
        refused = refusal(authorizer, account, secret, **fields)
        assert refused is not None and refused.code == ResponseCode.NO_PERMISSION, (account, fields)
    assert not any(one.is_super for one in read_rules(Path(settings.serve.acl_file)).accounts.values())


def test_a_server_with_it_answers_only_accounts_with_tls_and_a_certificate(
    settings: Settings, tmp_path: Path
) -> None:
    ca, key = str(tmp_path / "ca.pem"), settings.serve.tls_key
    with_certificate = TlsOptions(ca=ca, certificate=settings.serve.tls_certificate, key=key)
    account, other = Credentials("billing-consumer", SECRET), Credentials("tiered-sidecar", "CHANGE-ME-1")

    def result(address: str, tls: TlsOptions | None, credentials: Credentials | None) -> int | None:
        """The code of the reply to a pull; None without one."""
        client = BrokerClient(address, 5, credentials, None if tls is None else ClientTls(tls))
        try:
            return client.call(RequestCode.PULL_MESSAGE, PULL).code
        except TieredError:
            return None
        finally:
            client.close()

    async def pulled(_: Request) -> Response:
        return Response()

    async def results() -> list[int | None]:
        table = HandlerTable()
        table.register(RequestCode.PULL_MESSAGE)(pulled)
        listener = Listener(table, server_options(settings.serve))
        host, port = await listener.start()
        ways = (
            (with_certificate, account),
            (with_certificate, other),
            (with_certificate, None),
            (TlsOptions(ca=ca), account),
            (None, account),
        )
        try:
            return [await asyncio.to_thread(result, f"{host}:{port}", *way) for way in ways]
        finally:
            await listener.close(0)

    assert asyncio.run(results()) == [0, 16, 16, None, None]
