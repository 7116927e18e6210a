"""Checks this program: versions, the settings' origin, its directories."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from rocketmq_tiered.doctor.check import Check, CheckFinding, failed, failed_by, ok
from rocketmq_tiered.process.instance import running_instance
from tiered.console import counted
from tiered.errors import NotFoundError, TieredError
from tiered.private_directory import check_private, exposed_parent
from tiered.settings.load import CONFIG_VARIABLE, LoadedSettings
from tiered.version import VERSION


def host_checks(
    loaded: LoadedSettings, config_path: str | None, environment: Mapping[str, str], state_dir: Path | None
) -> list[Check]:
    """``config_path``: as given on the command line; ``state_dir``: of `tiered run` for this broker, if known."""
    checks = [
        Check("program", "program", program),
        Check("configuration", "configuration", lambda: configuration(loaded, config_path, environment)),
    ]
    if state_dir is not None:
        checks.append(Check("state-directory", "state directory", lambda: state_directory(state_dir)))
    cache = loaded.settings.fetch.disk_cache_path
    if cache:
        checks.append(
            Check("cache-directory", "cache directory", lambda: usable(Path(cache), "fetch.disk_cache_path"))
        )
    return checks


def program() -> CheckFinding:
    """Versions."""
    return ok(f"tiered {VERSION}, Python {platform.python_version()}, {platform.platform(terse=True)}")


def configuration(
    loaded: LoadedSettings, config_path: str | None, environment: Mapping[str, str]
) -> CheckFinding:
    """Where settings come from."""
    if config_path:
        source = f"{Path(config_path).absolute()} (--config)"
    elif environment.get(CONFIG_VARIABLE):
        source = f"{Path(environment[CONFIG_VARIABLE]).absolute()} (${CONFIG_VARIABLE})"
    else:
        source = "no file"
    return ok(
        f"{source}; {counted(len(loaded.origins), 'setting')} not at the default: tiered config check lists all"
    )


def state_directory(path: Path) -> CheckFinding:
    """The directory, and whether an instance uses it."""
    finding = usable(path, "process.state_dir")
    try:
        instance = running_instance(path)
    except (NotFoundError, TieredError):
        return finding
    return ok(f"{path}, used by the running process {instance.pid}")


def usable(path: Path, setting: str) -> CheckFinding:
    """Whether this user can write in ``path``, or create it, and others cannot."""
    try:
        if path.exists():
            check_private(path, setting)
    except TieredError as error:
        return failed_by(error)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return failed(
            f"{path}: user {os.geteuid()} cannot write in {existing}",
            f"chown {os.geteuid()} {existing}, or set {setting}",
        )
    exposed = exposed_parent(existing / "below" if existing != path else path)
    if exposed is not None:
        return failed(f"{path}: other users can write in {exposed}", f"chmod o-w {exposed}, or set {setting}")
    return ok(f"{path}" if existing == path else f"{path}, which does not exist yet")
