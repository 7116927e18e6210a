"""The architecture as a test: dependencies point one way, and each foreign library stays in its corner.

    rocketmq_tiered -> {uploader, fetcher} -> tiered
    inside rocketmq_tiered: cli -> doctor -> page -> process -> sending -> server -> maintenance; spark -> maintenance

Reads the sources by `ast`; nothing is imported, so a module that does not load is checked all the same.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tiered", "uploader", "fetcher", "rocketmq_tiered")
MAY_IMPORT = {
    "tiered": {"tiered"},
    "uploader": {"uploader", "tiered"},
    "fetcher": {"fetcher", "tiered"},
    "rocketmq_tiered": set(PACKAGES),
    "rocketmq_tiered/maintenance": {"rocketmq_tiered", "tiered"},
    "rocketmq_tiered/server": {"rocketmq_tiered", "fetcher", "tiered"},
}
"""Package, or one folder of it -> packages it may import."""
CORNERS = {
    "boto3": ("tiered/object_store/",),
    "cryptography": ("tiered/object_store/",),
    "botocore": ("tiered/object_store/",),
    "aioboto3": ("tiered/object_store/",),
    "aiobotocore": ("tiered/object_store/",),
    "numba": ("tiered/kernels/",),
    "llvmlite": ("tiered/kernels/",),
    "pyspark": ("rocketmq_tiered/spark/",),
    "duckdb": ("rocketmq_tiered/sql/",),
    "rocksdict": ("tiered/consume_queue/",),
    "tqdm": ("rocketmq_tiered/process/", "rocketmq_tiered/cli/"),
    "prometheus_client": ("rocketmq_tiered/process/", "rocketmq_tiered/cli/", "tiered/object_store/"),
    "socket": ("tiered/remoting/client.py", "rocketmq_tiered/process/admin.py", "rocketmq_tiered/server/"),
    "ssl": ("tiered/remoting/tls.py", "rocketmq_tiered/server/"),
    "socketserver": ("rocketmq_tiered/process/admin.py",),
    "yaml": ("rocketmq_tiered/server/security/", "tiered/remoting/credentials.py"),
    "http.server": ("rocketmq_tiered/process/admin.py",),
    "http.client": ("rocketmq_tiered/process/admin_client.py",),
    "urllib.request": (),
    "urllib3": ("tiered/object_store/",),
    "requests": (),
}
"""Module -> path prefixes where it may be imported."""

FOLDER_ORDER = {
    "tiered": (
        "lazy_names",
        "errors",
        "whole_file",
        "private_directory",
        "reloaded_files",
        "residency",
        "model",
        "timestamps",
        "clock",
        "console",
        "settings",
        "kernels",
        "formats",
        "object_store",
        "remoting",
        "consume_queue",
        "broker_store",
        "catalog",
        "archive",
    ),
    "fetcher": ("io", "blocks", "rows", "prefetch", "pulls", "policy", "queries", "sql92"),
    "rocketmq_tiered": (
        "message_table",
        "sql",
        "export",
        "maintenance",
        "server",
        "sending",
        "process",
        "page",
        "doctor",
        "cli",
        "spark",
    ),
    "rocketmq_tiered/message_table": ("options", "plan", "scan", "batches"),
    "rocketmq_tiered/spark": ("source", "jobs", "cli"),
    "rocketmq_tiered/server": (
        "wire",
        "security",
        "groups",
        "listen",
        "backend",
        "retries",
        "pop",
        "archive_mode",
        "proxy",
        "slave",
        "mount",
    ),
}
"""Inside these folders: one imports only those before it."""


class Import(NamedTuple):
    """One import statement."""

    path: str
    line: int
    module: str
    inside_function: bool
    for_types_only: bool


def _sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _imports(path: Path) -> Iterator[Import]:
    relative = path.relative_to(ROOT).as_posix()
    pending: list[tuple[ast.AST, bool, bool]] = [(ast.parse(path.read_text("utf-8")), False, False)]
    while pending:
        node, inside, typing_only = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(relative, node.lineno, alias.name, inside, typing_only)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative}:{node.lineno} uses a relative import"
            for alias in node.names:
                yield Import(relative, node.lineno, f"{node.module}.{alias.name}", inside, typing_only)
        elif isinstance(node, ast.Call):
            dynamic = _dynamic_import(node)
            if dynamic is not None:
                yield Import(relative, node.lineno, dynamic, inside, False)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = typing_only or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        pending.extend((child, inside, typing_only) for child in ast.iter_child_nodes(node))


def _dynamic_import(node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    if name not in ("importlib.import_module", "import_module", "__import__") or not node.args:
        return None
    argument = node.args[0]
    return str(argument.value) if isinstance(argument, ast.Constant) else "<computed>"


@cache
def _all_imports() -> list[Import]:
    return [found for path in _sources() for found in _imports(path)]


def _first_party(module: str) -> str | None:
    package = module.split(".", 1)[0]
    return package if package in PACKAGES else None


def _complain(found: Import, why: str) -> str:
    return f"{found.path}:{found.line} imports {found.module}: {why}"


def test_packages_depend_one_way() -> None:
    wrong = [
        _complain(found, f"{importer} may import only {sorted(MAY_IMPORT[importer])}")
        for found in _all_imports()
        for importer in [_importer(found.path)]
        if (target := _first_party(found.module)) and target not in MAY_IMPORT[importer]
    ]
    assert not wrong, "\n".join(wrong)


def test_folders_depend_one_way() -> None:
    wrong = [
        _complain(found, f"the order of {folder} is {', '.join(order)}")
        for folder, order in FOLDER_ORDER.items()
        for found in _all_imports()
        if (source := _below(folder, found.path.removesuffix(".py").split("/"))) in order
        and (target := _below(folder, found.module.split("."))) is not None
        and source != target
        and target not in order[: order.index(source)]
    ]
    assert not wrong, "\n".join(wrong)


def _importer(path: str) -> str:
    """The key of MAY_IMPORT that a file belongs to."""
    package, folder, *_ = [*path.split("/"), ""]
    return f"{package}/{folder}" if f"{package}/{folder}" in MAY_IMPORT else package


def _below(folder: str, names: list[str]) -> str | None:
    """The name directly below ``folder``; None for a path outside of it."""
    parts = folder.split("/")
    return names[len(parts)] if names[: len(parts)] == parts and len(names) > len(parts) else None


def test_no_two_folders_import_each_other() -> None:
    """In every package, also those without a declared order; a package's own modules count as a folder."""
    arrows = {
        (found.path.rsplit("/", 1)[0], _directory(found.module))
        for found in _all_imports()
        if _first_party(found.module) and found.module != "<computed>"
    }
    both = sorted(arrow for arrow in arrows if arrow[0] < arrow[1] and arrow[::-1] in arrows)
    assert not both, "\n".join(f"{one} and {other} import each other" for one, other in both)


def _directory(module: str) -> str:
    """The directory that holds a dotted name's module."""
    path = ROOT.joinpath(*module.split("."))
    while not path.is_dir():
        path = path.parent
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("library", sorted(CORNERS))
def test_library_stays_in_its_corner(library: str) -> None:
    corner = CORNERS[library]
    wrong = [
        _complain(found, f"allowed only in {corner or 'no module'}")
        for found in _all_imports()
        if (found.module == library or found.module.startswith(f"{library}."))
        and not found.path.startswith(corner or ("-",))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_first_party_import_hides_in_a_function() -> None:
    wrong = [
        _complain(found, "import it at the top of the module")
        for found in _all_imports()
        if found.inside_function and _first_party(found.module)
    ]
    assert not wrong, "\n".join(wrong)


def test_computed_imports_are_only_verbs_and_lazy_names() -> None:
    wrong = [
        _complain(found, "a computed import escapes this test")
        for found in _all_imports()
        if found.module == "<computed>"
        and found.path not in ("rocketmq_tiered/cli/__init__.py", "tiered/lazy_names.py")
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_without_cycles() -> None:
    modules = {_module_name(path): path for path in _sources()}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for found in _all_imports():
        if found.for_types_only or found.module == "<computed>":
            continue
        source = _module_name(ROOT / found.path)
        parent = found.module.rsplit(".", 1)[0]
        target = found.module if found.module in modules else parent
        if target in modules and target != source:
            graph[source].add(target)
    assert not (cycle := _find_cycle(graph)), " -> ".join(cycle)


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _find_cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if cycle := visit(target, [*trail, name]):
                return cycle
        done.add(name)
        return []

    for name in sorted(graph):
        if cycle := visit(name, []):
            return cycle
    return []


PLANTED = """
import typing
if typing.TYPE_CHECKING:
    from rocketmq_tiered.spark.session import session
def f():
    from rocketmq_tiered.cli import main
    importlib.import_module(name)
    import boto3
"""


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check fails on a module that breaks its rule."""
    made = {
        "tiered/formats/imaginary.py": PLANTED + "from tiered.archive import verify\n",
        "fetcher/blocks/imaginary.py": "from fetcher.pulls.message_fetcher import MessageFetcher\n",
        "rocketmq_tiered/process/one.py": "from rocketmq_tiered.process.sub.two import a\n",
        "rocketmq_tiered/process/sub/two.py": "from rocketmq_tiered.process.one import a\n",
        "rocketmq_tiered/maintenance/one.py": "from rocketmq_tiered.process import admin\nimport fetcher.archive\n",
    }
    for name, source in made.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / "fetcher" / "pulls").mkdir()
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    found = [one for name in made for one in _imports(tmp_path / name)]
    monkeypatch.setattr(sys.modules[__name__], "_all_imports", lambda: found)
    for check, says in (
        (test_packages_depend_one_way, "imports rocketmq_tiered.cli.main"),
        (test_packages_depend_one_way, "imports rocketmq_tiered.spark.session.session"),
        (test_packages_depend_one_way, "imports fetcher.archive"),
        (test_folders_depend_one_way, "imports tiered.archive.verify"),
        (test_folders_depend_one_way, "imports fetcher.pulls.message_fetcher"),
        (test_folders_depend_one_way, "imports rocketmq_tiered.process.admin"),
        (test_no_two_folders_import_each_other, "process and rocketmq_tiered/process/sub import each other"),
        (partial(test_library_stays_in_its_corner, "boto3"), "imports boto3"),
        (test_no_first_party_import_hides_in_a_function, "imports rocketmq_tiered.cli.main"),
        (test_computed_imports_are_only_verbs_and_lazy_names, "imports <computed>"),
        (
            test_modules_import_without_cycles,
            "process.one -> rocketmq_tiered.process.sub.two -> rocketmq_tiered.process.one",
        ),
    ):
        with pytest.raises(AssertionError, match=re.escape(says)):
            check()
