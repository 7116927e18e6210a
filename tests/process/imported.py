"""What a command line has imported when it ends. A start takes as long as its imports, so tests bound these and not
seconds, which a busy machine doubles; benchmarks/one_shot.py has the seconds."""

import subprocess
import sys

STARTING = frozenset({"fastcrc", "lz4", "numpy", "orjson", "zstandard"})
"""Each loads in some milliseconds, numpy in a tenth of a second; numba, boto3 or rocksdict alone would take as long as
a whole command may."""
_OURS = {"tiered", "fetcher", "uploader", "rocketmq_tiered"}


def imported(*command_lines: list[str]) -> set[str]:
    """Top-level names of all modules that ``tiered`` with these arguments has imported, in a process of its own."""
    script = (
        "import sys, contextlib, io\n"
        "from rocketmq_tiered.cli import main\n"
        f"for words in {command_lines!r}:\n"
        "    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())), contextlib.suppress(SystemExit):\n"
        "        code = main(words)\n"
        "        assert code == 0, code\n"
        "specs = (getattr(module, '__spec__', None) for module in sys.modules.values())\n"
        "print(*{spec.name.partition('.')[0] for spec in specs if spec})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split() if not name.startswith("_")}


def libraries(names: set[str]) -> set[str]:
    """Those of ``names`` that are neither Python's own nor ours."""
    return names - set(sys.stdlib_module_names) - _OURS
