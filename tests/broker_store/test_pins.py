"""Pins keep files readable and never hurt the broker."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.broker_store.record_bytes import log_file, records
from tests.broker_store.unprivileged import UNPRIVILEGED_UID, run_unprivileged
from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.broker_store.conf import broker_conf
from tiered.broker_store.pins import (
    OWNER_FILE,
    FileIdentity,
    Pin,
    PinKeeper,
    PinLimits,
    PinMethod,
    measure_disk,
    plan_pins,
)
from tiered.broker_store.retention import DiskUse

SIZE = 4096
LIMITS = PinLimits()


def file(number: int) -> LogFile:
    return LogFile(number * SIZE, SIZE, Path(f"/log/{number}"))


def files(*numbers: int) -> dict[LogFile, FileIdentity]:
    return {file(number): FileIdentity(1, number) for number in numbers}


def pin(number: int, inode: int | None = None) -> Pin:
    identity = FileIdentity(1, number if inode is None else inode)
    return Pin(number * SIZE, SIZE, identity, PinMethod.LINK, Path(f"/pins/{number}"))


def test_what_is_not_archived_is_pinned_and_what_is_is_released() -> None:
    plan = plan_pins(
        files(0, 1, 2, 3), [pin(0), pin(1)], archived_phys=SIZE + 10, used_ratio=0.1, limits=LIMITS
    )
    assert plan.release == (pin(0),)
    assert plan.create == (file(2), file(3))


def test_no_new_pin_above_the_lower_limit() -> None:
    assert plan_pins(files(0, 1), [], 0, 0.65, LIMITS).create == ()
    assert plan_pins(files(0, 1), [pin(0)], 0, 0.70, LIMITS).release == ()


def test_all_released_oldest_first_above_the_upper_limit() -> None:
    plan = plan_pins(files(2), [pin(1), pin(0), pin(2)], 0, 0.73, LIMITS)
    assert plan.release == (pin(0), pin(1), pin(2))
    assert plan.create == ()


def test_pin_of_a_file_the_broker_deleted_stays() -> None:
    assert plan_pins(files(1, 2), [pin(0), pin(1), pin(2)], 0, 0.5, LIMITS).release == ()


def test_pin_of_a_file_created_again_is_replaced() -> None:
    plan = plan_pins(files(0, 1), [pin(0), pin(1, inode=77)], 0, 0.1, LIMITS)
    assert plan.release == (pin(1, inode=77),)
    assert plan.create == (file(1),)


def test_pin_above_the_brokers_last_file_is_stale() -> None:
    assert plan_pins(files(0, 1), [pin(1), pin(2)], 0, 0.1, LIMITS).release == (pin(2),)


@pytest.mark.parametrize(
    ("properties", "release"),
    [
        ({}, 0.72),
        ({"diskMaxUsedSpaceRatio": "60"}, 0.59),
        ({"diskSpaceCleanForciblyRatio": "50"}, 0.49),
        ({"diskMaxUsedSpaceRatio": "95"}, 0.72),
    ],
)
def test_always_below_the_brokers_own_thresholds(properties: dict[str, str], release: float) -> None:
    limits = LIMITS.below_broker(broker_conf(properties))
    assert limits.release_above_ratio == pytest.approx(release)
    assert limits.create_below_ratio <= 0.65
    assert limits.create_below_ratio < limits.release_above_ratio


@given(
    present=st.sets(st.integers(0, 9)),
    pinned=st.sets(st.integers(0, 9)),
    archived=st.integers(0, 10 * SIZE),
    used=st.floats(0, 1),
)
def test_plans_never_pin_twice_nor_above_the_limits(
    present: set[int], pinned: set[int], archived: int, used: float
) -> None:
    plan = plan_pins(files(*present), [pin(number) for number in pinned], archived, used, LIMITS)
    kept = {number * SIZE for number in pinned} - {released.begin_phys for released in plan.release}
    assert not kept & {created.begin_phys for created in plan.create}
    assert all(created.end_phys > archived for created in plan.create)
    assert used < LIMITS.create_below_ratio or not plan.create
    assert used <= LIMITS.release_above_ratio or not kept


class Broker:
    """A commitlog directory and a disk whose use is set by hand."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "store" / "commitlog"
        self.used_ratio = 0.1
        self.paths = [
            log_file(self.directory, n * SIZE, records(n * SIZE, [b"%d" % n] * 5), SIZE) for n in range(4)
        ]

    def disk_use(self, path: Path) -> DiskUse:
        assert path.exists()
        return DiskUse(self.used_ratio, 1 << 30)


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    return Broker(tmp_path)


def test_pinned_files_outlive_the_broker_and_the_process(broker: Broker, tmp_path: Path) -> None:
    keeper = PinKeeper([tmp_path / "pins"], LIMITS, broker.disk_use)
    log = CommitLog([broker.directory], pinned=keeper.files)
    before = log.read(0, SIZE)
    status = keeper.step(log.files, archived_phys=0)
    assert [p.method for p in status.pins] == [PinMethod.LINK] * 4
    assert (status.unpinned, status.problem) == ((), "")
    for path in broker.paths[:2]:
        path.unlink()
    log.refresh()
    assert (log.min_phys, log.broker_min_phys) == (0, 2 * SIZE)
    assert log.read(0, SIZE) == before

    again = PinKeeper([tmp_path / "pins"], LIMITS, broker.disk_use)
    log = CommitLog([broker.directory], pinned=again.files)
    assert log.read(0, SIZE) == before
    status = again.step(log.files, archived_phys=2 * SIZE)
    assert status.released == 2
    log.refresh()
    assert log.min_phys == 2 * SIZE


def test_full_disk_releases_everything(broker: Broker, tmp_path: Path) -> None:
    keeper = PinKeeper([tmp_path / "pins"], LIMITS, broker.disk_use)
    log = CommitLog([broker.directory], pinned=keeper.files)
    keeper.step(log.files, 0)
    broker.paths[0].unlink()
    broker.used_ratio = 0.73
    status = keeper.step(log.files, 0)
    assert (status.pins, status.released) == ((), 4)
    assert len(status.unpinned) == 3
    assert list((tmp_path / "pins").iterdir()) == []
    log.refresh()
    assert log.min_phys == SIZE


def test_files_share_their_bytes_with_the_pin(broker: Broker, tmp_path: Path) -> None:
    PinKeeper([tmp_path / "pins"], LIMITS, broker.disk_use).step(CommitLog([broker.directory]).files, 0)
    for path in broker.paths:
        assert path.stat().st_nlink == 2
        assert (tmp_path / "pins" / path.name).samefile(path)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EROFS])
def test_where_link_is_refused_descriptors_are_kept(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    keeper = PinKeeper([tmp_path / "pins"], LIMITS, broker.disk_use)
    log = CommitLog([broker.directory], pinned=keeper.files)
    before = log.read(0, SIZE)
    status = keeper.step(log.files, 0)
    assert {p.method for p in status.pins} == {PinMethod.DESCRIPTOR}
    assert os.strerror(code) in status.problem
    broker.paths[0].unlink()
    log.refresh()
    assert log.read(0, SIZE) == before
    log.close()
    keeper.close()
    log.refresh()
    assert log.min_phys == SIZE
    assert not any(str(broker.directory) in _target(fd) for fd in os.listdir("/proc/self/fd"))


def test_what_descriptors_keep_passes_to_the_next_keeper(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as refusing:
        refusing.setattr(os, "link", refuse)
        before = PinKeeper([tmp_path / "pins"], LIMITS, broker.disk_use)
        log = CommitLog([broker.directory], pinned=before.files)
        data = log.read(0, SIZE)
        before.step(log.files, 0)
        log.close()
    broker.paths[0].unlink()
    (tmp_path / "pins").mkdir(exist_ok=True)
    os.link(broker.paths[1], tmp_path / "pins" / broker.paths[1].name)
    after = PinKeeper([tmp_path / "pins"], LIMITS, broker.disk_use)
    after.inherit(before)
    before.close()
    log = CommitLog([broker.directory], pinned=after.files)
    assert log.read(0, SIZE) == data
    status = after.step(log.files, SIZE)
    assert status.released == 1
    assert sorted(pin.method.name for pin in status.pins) == ["DESCRIPTOR", "DESCRIPTOR", "LINK"]
    after.close()
    log.close()
    assert not any(str(broker.directory) in _target(fd) for fd in os.listdir("/proc/self/fd"))


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_pin_keeps_the_brokers_mode_and_owner_and_its_directory_keeps_others_out(
    broker: Broker, tmp_path: Path
) -> None:
    """A pin is the broker's own file: to change its mode would change the broker's."""
    for path in broker.paths:
        path.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(broker.paths[0], UNPRIVILEGED_UID, UNPRIVILEGED_UID)
    before = [(path.stat().st_mode, path.stat().st_uid, path.stat().st_ino) for path in broker.paths]
    pins = tmp_path / "below" / "pins"
    pins.mkdir(parents=True)
    pins.chmod(0o755)  # as made under a common umask
    keeper = PinKeeper([pins], LIMITS, broker.disk_use, owner="b in store")
    status = keeper.step(CommitLog([broker.directory]).files, 0)
    assert {pin.method for pin in status.pins} == {PinMethod.LINK} and not status.problem
    links = [pins / path.name for path in broker.paths]
    assert [(path.stat().st_mode, path.stat().st_uid, path.stat().st_ino) for path in links] == before
    assert pins.stat().st_mode & 0o777 == 0o700
    assert (pins / OWNER_FILE).stat().st_mode & 0o777 == 0o600

    def work() -> str:
        with pytest.raises(PermissionError):
            links[0].read_bytes()
        return "locked out"

    assert run_unprivileged(work, tmp_path / "below") == "locked out"
    keeper.close()


def test_files_planted_as_pins_are_not_read_as_the_brokers_log(broker: Broker, tmp_path: Path) -> None:
    """Anyone could make them in a directory in which others write: they would be archived."""
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / broker.paths[0].name).write_bytes(bytes(SIZE))
    pins.chmod(0o777)
    broker.paths[0].unlink()
    keeper = PinKeeper([pins], LIMITS, broker.disk_use)
    assert keeper.files() == [] and f"chmod 700 {pins}" in keeper.problem
    status = keeper.step(CommitLog([broker.directory]).files, 0)
    assert {pin.method for pin in status.pins} == {PinMethod.DESCRIPTOR}
    assert "mode 0777" in status.problem
    keeper.close()


def test_directory_on_another_disk_is_not_used(broker: Broker, tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    place = elsewhere / f"tiered-pins-{os.getpid()}"
    try:
        keeper = PinKeeper([place, tmp_path / "pins"], LIMITS, broker.disk_use)
        status = keeper.step(CommitLog([broker.directory]).files, 0)
        assert {p.path.parent for p in status.pins} == {tmp_path / "pins"}
    finally:
        place.rmdir()


def test_disk_use_is_counted_as_the_broker_does(tmp_path: Path) -> None:
    use = measure_disk(tmp_path)
    status = os.statvfs(tmp_path)
    exact = (status.f_blocks - status.f_bfree) / (status.f_blocks - status.f_bfree + status.f_bavail)
    assert exact <= use.used_ratio < exact + 0.0101
    assert use.used_ratio * 100 == pytest.approx(round(use.used_ratio * 100))


def test_another_stores_pins_are_not_this_brokers_log(tmp_path: Path) -> None:
    """Two brokers of one host whose sidecars were given one directory: every log has a file at offset 0."""
    logs = {}
    for name in ("a", "b"):
        log_file(tmp_path / name, 0, records(0, [name.encode() * 9]), SIZE)
        log_file(tmp_path / name, SIZE, records(SIZE, [name.encode() * 9]), SIZE)
        logs[name] = CommitLog([tmp_path / name])
    keepers = {
        name: PinKeeper([tmp_path / "pins"], PinLimits(0.999, 0.9999), owner=name) for name in ("a", "b")
    }
    assert {pin.method for pin in keepers["a"].step(logs["a"].files, 0).pins} == {PinMethod.LINK}
    second = keepers["b"].step(logs["b"].files, 0)
    assert {pin.method for pin in second.pins} == {PinMethod.DESCRIPTOR}
    assert "names another store" in second.problem
    for name, keeper in keepers.items():
        (tmp_path / name / f"{0:020d}").unlink()
        with_pins = CommitLog([tmp_path / name], pinned=keeper.files)
        assert name.encode() * 9 in with_pins.read(0, 200)
        keeper.close()
    # The second alone, later: what the first left is not its own.
    assert PinKeeper([tmp_path / "pins"], PinLimits(0.999, 0.9999), owner="b").files() == []
    assert len(PinKeeper([tmp_path / "pins"], PinLimits(0.999, 0.9999), owner="a").files()) == 2
