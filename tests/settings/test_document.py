"""docs/SETTINGS.md is generated; this fails when it is not current."""

from pathlib import Path

from tests.settings.settings_document import settings_document
from tiered.settings.load import FIELDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "SETTINGS.md"


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text("utf-8") == settings_document(), (
        "run: .venv/bin/python -m tests.settings.settings_document > docs/SETTINGS.md"
    )


def test_every_setting_is_documented() -> None:
    text = settings_document()
    assert all(f"`{item.name}`" in text for item in FIELDS.values())
