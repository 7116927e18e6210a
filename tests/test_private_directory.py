"""A directory that another user made, can write to or has linked is refused; one's own is closed to others."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fetcher.blocks.disk_cache import DiskCache
from rocketmq_tiered.page.page_requests import read_token
from rocketmq_tiered.process.instance import StateDirectory
from rocketmq_tiered.server.security.rules import read_rules, rules_in_file
from tests.broker_store.unprivileged import UNPRIVILEGED_UID, run_unprivileged
from tiered.errors import AccessDeniedError, UsageError
from tiered.private_directory import (
    check_private,
    exposed_parent,
    log_exposed_parent,
    make_private,
    private_temporary,
)
from tiered.remoting.credentials import read_credentials
from tiered.remoting.tls import password_in

SETTING = "process.state_dir"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")


def test_every_level_that_is_made_is_private(tmp_path: Path, no_umask: None) -> None:
    make_private(tmp_path / "a" / "b" / "c", SETTING)
    assert [mode_of(tmp_path / level) for level in ("a", "a/b", "a/b/c")] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o500])
def test_an_own_directory_is_closed_to_others(tmp_path: Path, mode: int) -> None:
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(mode)
    check_private(own, SETTING)
    assert mode_of(own) == mode
    make_private(own, SETTING)
    assert mode_of(own) == (0o700 if mode & 0o077 else mode)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_directory_in_which_others_write_is_refused_with_the_command_that_closes_it(
    tmp_path: Path, mode: int
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    for refuse in (make_private, check_private):
        with pytest.raises(AccessDeniedError, match=f"mode {mode:04o}") as refused:
            refuse(shared, SETTING)
        assert f"chmod 700 {shared}" in refused.value.hint and SETTING in refused.value.hint
    assert mode_of(shared) == mode


@needs_root
def test_a_directory_of_another_user_is_refused_with_the_command_that_takes_it(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir(mode=0o700)
    os.chown(tmp_path / "foreign", UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    with pytest.raises(AccessDeniedError, match=f"belongs to user {UNPRIVILEGED_UID}") as refused:
        make_private(tmp_path / "foreign", SETTING)
    assert f"chown 0 {tmp_path}/foreign" in refused.value.hint
    assert (tmp_path / "foreign").stat().st_uid == UNPRIVILEGED_UID


@needs_root
@pytest.mark.parametrize("below", ["", "state"])
def test_a_link_of_another_user_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "target").mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    make_private(link / below, SETTING)
    assert mode_of(tmp_path / "target" / below) == 0o700
    os.lchown(link, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    with pytest.raises(AccessDeniedError, match=rf"link is a symbolic link of user {UNPRIVILEGED_UID}"):
        make_private(link / below, SETTING)


def test_a_directory_of_root_is_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    def work() -> str:
        make_private(Path("/etc"), SETTING)
        with pytest.raises(PermissionError):
            make_private(tmp_path / "none", SETTING)
        return "trusted"

    assert run_unprivileged(work, tmp_path) == "trusted"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o777, 0o1777])
def test_a_parent_in_which_others_rename_is_logged(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(mode)
    make_private(tmp_path / "between" / "state", SETTING)
    log_exposed_parent(tmp_path / "between" / "state")
    is_exposed = mode == 0o777
    assert exposed_parent(tmp_path / "between" / "state") == (tmp_path if is_exposed else None)
    assert (f"other users can write to {tmp_path}" in caplog.text) is is_exposed


FILLERS: dict[str, Callable[[Path], object]] = {
    "process.state_dir": lambda directory: StateDirectory(directory).__enter__(),
    "fetch.disk_cache_path": lambda directory: DiskCache(directory, 1 << 20),
}


@needs_root
@pytest.mark.parametrize("plant", ["directory", "writable", "link"])
@pytest.mark.parametrize("setting", FILLERS)
def test_no_directory_is_filled_that_another_user_prepared(tmp_path: Path, setting: str, plant: str) -> None:
    planted = tmp_path / "planted"
    (tmp_path / "elsewhere").mkdir()
    planted.symlink_to(tmp_path / "elsewhere") if plant == "link" else planted.mkdir()
    if plant == "writable":
        planted.chmod(0o777)
    else:
        os.lchown(planted, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    with pytest.raises(AccessDeniedError, match=f"{planted} .*{setting}"):
        FILLERS[setting](planted)
    assert not list((tmp_path / "elsewhere").iterdir()) and not list(planted.iterdir())


def test_temporary_files_are_private_in_a_shared_directory(
    tmp_path: Path, no_umask: None, caplog: pytest.LogCaptureFixture
) -> None:
    for mode, is_logged in ((0o1777, False), (0o777, True)):
        (tmp_path / str(mode)).mkdir()
        (tmp_path / str(mode)).chmod(mode)
        with private_temporary(tmp_path / str(mode), "compaction-") as directory:
            assert mode_of(Path(directory)) == 0o700
        assert ("other users can write to" in caplog.text) is is_logged


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "serve.acl_file": ("accounts: []\n", read_rules),
    "admin.token_file": ("0123456789abcdef\n", lambda path: read_token(str(path))),
    "broker.credentials_file": ("accessKey: a\nsecretKey: b\n", read_credentials),
    "serve.tls_key_password_file": (
        "secret\n",
        lambda path: password_in(str(path), "serve.tls_key_password_file"),
    ),
}


@pytest.mark.parametrize("setting", READERS)
def test_a_file_of_secrets_is_refused_if_others_write_it_and_named_if_they_read_it(
    tmp_path: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, read = READERS[setting]
    path = tmp_path / "file"
    path.write_text(content)
    path.chmod(0o666)
    with pytest.raises(UsageError, match="mode 0666") as refused:
        read(path)
    assert setting in str(refused.value) and f"chmod 600 {path}" in refused.value.hint
    path.chmod(0o644)
    read(path)
    assert [setting in line and "mode 0644" in line for line in caplog.messages] == [True]
    path.chmod(0o600)
    read(path)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("setting", READERS)
def test_a_pipe_instead_of_a_file_of_secrets_is_refused(tmp_path: Path, setting: str) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        READERS[setting][1](tmp_path / "pipe")


def test_rules_that_others_may_write_now_are_not_reloaded(tmp_path: Path) -> None:
    path, reloads = tmp_path / "rules", list[bool]()
    path.write_text("accounts: [{accessKey: reader1, secretKey: secret1}]\n")
    path.chmod(0o600)
    rules = rules_in_file(path, reloads.append)
    path.write_text("accounts: [{accessKey: planted1, secretKey: secret1}]\n\n")
    path.chmod(0o666)
    assert list(rules.now().accounts) == ["reader1"] and reloads == [False]
