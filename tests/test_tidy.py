"""Style as a test, a ratchet: what is listed as an exception may only get shorter.

Rules: every module says what it owns; functions stay short and take few arguments; no junk-drawer names; no
swallowed errors; documents cite symbols, not lines.
"""

import ast
import gc
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tiered.settings.sections import SECTIONS

ROOT = Path(__file__).parent.parent
PRODUCT = ("tiered", "uploader", "fetcher", "rocketmq_tiered")
STATEMENTS_PER_FUNCTION_MAX = 46
STATEMENTS_PER_MODULE_MAX = 400
ARGUMENTS_MAX = 12
JUNK_DRAWERS = re.compile(r"(^|_)(util|utils|helper|helpers|common|misc|manager|stuff)$")

MANY_ARGUMENTS: dict[str, int] = {}
"""``path::function`` -> arguments. Kernels over plain arrays may need many."""


def _modules(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _trees_end_with_the_module() -> Iterator[None]:
    """A million nodes: collecting garbage among them takes three times as long as parsing does."""
    gc.disable()
    yield
    _tree.cache_clear()
    gc.enable()


def _functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    pending: list[tuple[str, ast.AST]] = [("", _tree(path))]
    while pending:
        prefix, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{_relative(path)}::{name}", child
            pending.append((name, child))


def _statements(node: ast.AST) -> int:
    """Statements below a node without docstrings: how code is laid out does not change it."""
    return sum(
        isinstance(child, ast.stmt) and not _is_docstring(child) for child in ast.walk(node)
    ) - isinstance(node, ast.stmt)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _argument_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in every if argument.arg not in ("self", "cls")])


def _is_kernel(name: str) -> bool:
    return name.startswith("tiered/kernels/")


def test_modules_open_with_what_they_own() -> None:
    bare = []
    for path in _modules(*PRODUCT, "tests", "benchmarks", "examples"):
        text = path.read_text("utf-8")
        is_empty_package = path.name == "__init__.py" and not text.strip()
        if not is_empty_package and not ast.get_docstring(_tree(path)):
            bare.append(_relative(path))
    assert not bare, f"no docstring: {bare}"


def test_modules_stay_small() -> None:
    sizes = {_relative(path): _statements(_tree(path)) for path in _modules(*PRODUCT)}
    long = {name: count for name, count in sizes.items() if count > STATEMENTS_PER_MODULE_MAX}
    assert not long, f"split by role: {long}"


def test_functions_stay_short() -> None:
    sizes = {name: _statements(node) for path in _modules(*PRODUCT) for name, node in _functions(path)}
    long = {
        name: count
        for name, count in sizes.items()
        if count > STATEMENTS_PER_FUNCTION_MAX and not _is_kernel(name)
    }
    assert not long, f"too long: {long}"


def test_functions_take_few_arguments() -> None:
    counts = {name: _argument_count(node) for path in _modules(*PRODUCT) for name, node in _functions(path)}
    allowed = {name: MANY_ARGUMENTS.get(name, ARGUMENTS_MAX) for name in counts}
    grown = {name: count for name, count in counts.items() if count > allowed[name] and not _is_kernel(name)}
    assert not grown, f"too many arguments: {grown}"


def test_no_junk_drawers() -> None:
    named = [
        _relative(path)
        for path in _modules(*PRODUCT, "tests", "benchmarks")
        if any(JUNK_DRAWERS.search(part) for part in path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not named, f"say what it owns instead: {named}"


def test_no_error_is_swallowed() -> None:
    swallowed = []
    for path in _modules(*PRODUCT):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node) and _does_nothing(node.body):
                swallowed.append(f"{_relative(path)}:{node.lineno}")
    assert not swallowed, f"a broad except that does nothing: {swallowed}"


def _is_broad(node: ast.ExceptHandler) -> bool:
    return node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Pass | ast.Continue) for statement in body)


def test_no_file_imports_a_test_file() -> None:
    """What several test files use lies in a module of its own."""
    found = [
        f"{_relative(path)}:{node.lineno} imports {node.module}"
        for path in _modules("tests", "benchmarks")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom) and re.search(r"(^|\.)test_\w+$", node.module or "")
    ]
    assert not found, f"move what is shared to a support module: {found}"


PRINTING = {"print", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc"}


def test_text_is_printed_in_one_place_which_escapes_names() -> None:
    printing = [
        f"{_relative(path)}:{node.lineno}"
        for path in _modules(*PRODUCT)
        if _relative(path) != "tiered/console.py"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PRINTING
    ]
    assert not printing, f"log it, return it, or use tiered.console: {printing}"


def test_public_definitions_are_documented() -> None:
    bare = []
    for path in _modules(*PRODUCT):
        for node in _tree(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_") and ast.get_docstring(node) is None:
                bare.append(f"{_relative(path)}:{node.lineno} {node.name}")
    assert not bare, f"no docstring: {bare}"


def test_documents_name_existing_files_and_settings_without_line_numbers() -> None:
    problems = []
    settings = {f"{name}.{item.name}" for name, section in SECTIONS.items() for item in fields(section)}
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    for document in sorted(documents):
        text = document.read_text("utf-8")
        problems += [f"{_relative(document)}: {found}" for found in re.findall(r"\w+\.py:\d+", text)]
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            if not (document.parent / target).exists():
                problems.append(f"{_relative(document)}: dead link {target}")
        for key in re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+)`", text):
            if key not in settings | {"broker.conf"} and document.name != "SETTINGS.md":
                problems.append(f"{_relative(document)}: no such setting {key}")
        for cited in re.findall(
            r"`((?:tiered|uploader|fetcher|rocketmq_tiered|tests|benchmarks)/[\w/.]+\w)`",
            text,
        ):
            if not (ROOT / cited).exists() and "results" not in document.parts:
                problems.append(f"{_relative(document)}: no such file {cited}")
    assert not problems, "\n".join(problems)


def test_decisions_have_a_title_a_status_and_one_line_in_the_index() -> None:
    folder = ROOT / "docs/decisions"
    problems, titles = [], []
    for path in sorted(folder.glob("0*.md")):
        title, _, status, *_ = path.read_text("utf-8").splitlines()
        if not re.match(rf"# {path.name[:4]} \S", title):
            problems.append(f"{path.name}: the title is not '# {path.name[:4]} what is decided'")
        if not re.match(r"(Accepted|Rejected|Replaced by \S+), \d{4}-\d\d-\d\d[.;]", status):
            problems.append(f"{path.name}: line 3 is not 'Accepted, YYYY-MM-DD.'")
        titles.append(f"- [{title[2:]}]({path.name})")
    index = re.findall(r"^- \[.*", (folder / "README.md").read_text("utf-8"), re.MULTILINE)
    assert not problems, "\n".join(problems)
    assert sorted(index) == sorted(titles)


def test_the_first_pages_stay_short() -> None:
    limits = {"README.md": 120, "CHANGELOG.md": 80}
    lines = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in limits}
    assert all(lines[name] <= limit for name, limit in limits.items()), lines
