"""The architecture as a test: dependencies point one way, and each foreign library stays in its corner.

    sidecar -> server -> fetcher -> tiered
    {sidecar, pipeline} -> {uploader, maintenance, fetcher} -> tiered
    rocketmq_tiered -> fetcher; rocketmq_tiered.spark -> pipeline

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
PACKAGES = (
    "tiered",
    "uploader",
    "maintenance",
    "fetcher",
    "server",
    "sidecar",
    "pipeline",
    "rocketmq_tiered",
)
MAY_IMPORT = {
    "tiered": {"tiered"},
    "uploader": {"uploader", "tiered"},
    "maintenance": {"maintenance", "tiered"},
    "fetcher": {"fetcher", "tiered"},
    "server": {"server", "fetcher", "tiered"},
    "sidecar": {"sidecar", "server", "uploader", "maintenance", "fetcher", "tiered"},
    "pipeline": {"pipeline", "uploader", "maintenance", "fetcher", "tiered"},
    "rocketmq_tiered": {"rocketmq_tiered", "fetcher", "tiered"},
    "rocketmq_tiered/spark.py": {"rocketmq_tiered", "pipeline"},
}
"""Package, or one module of it -> packages it may import."""
CORNERS = {
    "boto3": ("tiered/object_store/",),
    "botocore": ("tiered/object_store/",),
    "aioboto3": ("tiered/object_store/",),
    "aiobotocore": ("tiered/object_store/",),
    "numba": ("tiered/kernels/",),
    "llvmlite": ("tiered/kernels/",),
    "pyspark": ("pipeline/",),
    "rocksdict": ("tiered/broker_store/",),
    "tqdm": ("sidecar/",),
    "prometheus_client": ("sidecar/", "tiered/object_store/"),
    "socket": ("tiered/remoting/client.py", "sidecar/admin.py", "server/"),
    "ssl": ("tiered/remoting/tls.py", "server/"),
    "socketserver": ("sidecar/admin.py",),
    "yaml": ("server/security/", "tiered/remoting/credentials.py"),
    "http.server": ("sidecar/admin.py",),
    "http.client": ("sidecar/admin_client.py",),
    "urllib.request": (),
    "urllib3": ("tiered/object_store/",),
    "requests": (),
}
"""Module -> path prefixes where it may be imported."""

TIERED_ORDER = (
    "errors", "private_directory", "model", "settings", "kernels", "formats", "object_store", "remoting",
    "broker_store", "index", "catalog", "flat_file",
)  # fmt: skip
"""Inside tiered: a folder imports only folders before it."""

FOLDER_ORDER = {
    "pipeline": ("options", "plan", "scan", "batches", "source", "jobs", "cli"),
    "fetcher": ("io", "blocks", "rows", "prefetch", "pulls", "policy", "queries", "sql92"),
    "server": (
        "wire", "security", "groups", "listen", "backend", "retries", "pop", "archive_mode", "proxy", "slave",
    ),
}  # fmt: skip
"""Inside these packages: a folder imports only folders before it, and never the package's own modules."""


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
        for importer in [found.path if found.path in MAY_IMPORT else found.path.split("/", 1)[0]]
        if (target := _first_party(found.module)) and target not in MAY_IMPORT[importer]
    ]
    assert not wrong, "\n".join(wrong)


def test_subpackages_of_tiered_depend_one_way() -> None:
    wrong = []
    for found in _all_imports():
        own, target = found.path.split("/"), found.module.split(".")
        if own[0] != "tiered" or target[0] != "tiered" or len(own) < 3 or len(target) < 2:
            continue
        source, sink = own[1], target[1]
        if source == sink:
            continue
        if TIERED_ORDER.index(sink) >= TIERED_ORDER.index(source):
            wrong.append(_complain(found, f"the order of tiered is {', '.join(TIERED_ORDER)}"))
    assert not wrong, "\n".join(wrong)


def _folder(module: str) -> str | None:
    """The folder of a package that a dotted name lies in; None for the package's own modules."""
    package, _, rest = module.partition(".")
    first = rest.split(".", 1)[0]
    return first if (ROOT / package / first).is_dir() else None


def test_folders_of_a_package_depend_one_way() -> None:
    wrong = []
    for found in _all_imports():
        package = found.path.split("/", 1)[0]
        order = FOLDER_ORDER.get(package)
        source, target = _folder(found.path.replace("/", ".")), _folder(found.module)
        if order is None or source is None or _first_party(found.module) != package or target == source:
            continue
        if target is None or order.index(target) >= order.index(source):
            wrong.append(_complain(found, f"the order of {package} is {', '.join(order)}"))
    assert not wrong, "\n".join(wrong)


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


def test_computed_imports_are_only_the_cli_verbs() -> None:
    wrong = [
        _complain(found, "a computed import escapes this test")
        for found in _all_imports()
        if found.module == "<computed>" and found.path != "sidecar/cli/__init__.py"
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
    from pipeline.session import session
def f():
    from sidecar.cli import main
    importlib.import_module(name)
    import boto3
"""


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check fails on a module that breaks its rule."""
    made = {
        "tiered/formats/imaginary.py": PLANTED + "from tiered.flat_file import verify\n",
        "fetcher/blocks/imaginary.py": "from fetcher.pulls.message_fetcher import MessageFetcher\n",
        "server/one.py": "from server.two import a\n",
        "server/two.py": "from server.one import a\n",
        "sidecar/one.py": "from sidecar.cli.two import a\n",
        "sidecar/cli/two.py": "from sidecar.one import a\n",
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
        (test_packages_depend_one_way, "imports sidecar.cli.main"),
        (test_packages_depend_one_way, "imports pipeline.session.session"),
        (test_subpackages_of_tiered_depend_one_way, "imports tiered.flat_file.verify"),
        (test_folders_of_a_package_depend_one_way, "imports fetcher.pulls.message_fetcher"),
        (test_no_two_folders_import_each_other, "sidecar and sidecar/cli import each other"),
        (partial(test_library_stays_in_its_corner, "boto3"), "imports boto3"),
        (test_no_first_party_import_hides_in_a_function, "imports sidecar.cli.main"),
        (test_computed_imports_are_only_the_cli_verbs, "imports <computed>"),
        (test_modules_import_without_cycles, "server.one -> server.two -> server.one"),
    ):
        with pytest.raises(AssertionError, match=re.escape(says)):
            check()
