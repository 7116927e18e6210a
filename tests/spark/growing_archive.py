"""An archive that grows commit by commit, made from a whole one by holding its newest commits back."""

import shutil
from pathlib import Path


class GrowingArchive:
    """A copy of ``whole`` at ``root`` that shows its first ``shown`` commits, and more on request."""

    def __init__(self, whole: Path, root: Path, archive: str, shown: int) -> None:
        shutil.copytree(whole, root)
        self.url = f"file://{root}"
        newest_first = sorted((root / archive / "catalog").iterdir())
        self._hidden = [(path, path.read_bytes()) for path in newest_first[: len(newest_first) - shown]]
        for path, _ in self._hidden:
            path.unlink()

    def show(self, commits: int) -> None:
        """Make so many more commits visible."""
        for _ in range(min(commits, len(self._hidden))):
            path, data = self._hidden.pop()
            path.write_bytes(data)

    @property
    def hidden_commits(self) -> int:
        """Commits held back."""
        return len(self._hidden)
