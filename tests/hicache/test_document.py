"""The pages about the cache: state diagrams and settings are those of the code, and the scenarios that are named exist.

Run as a program, this rewrites the diagrams and the table of settings.
"""

from __future__ import annotations

import re
from pathlib import Path

from devipc.hicache.daemon.options import option_table
from devipc.hicache.operations import TABLES, Side, diagram
from tests.hicache import matrix  # noqa: F401 - fills the registry
from tests.hicache.scenario import SCENARIOS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "hicache"
CONCEPTS, PROTOCOL, CONFIGURATION = DOCS / "index.md", DOCS / "protocol.md", DOCS / "configuration.md"
OPTIONS = re.compile(r"(?<=^<!-- options -->\n).*?(?=^<!-- end of options -->$)", re.M | re.S)
SECTION = re.compile(
    r"^### (?P<title>[^,\n]*), on the (?P<side>client|engine)'s side\n\n```mermaid\n.*?^```\n", re.M | re.S
)
TABLE_OF = {"Everything that only asks and answers": "call"}
ROW = re.compile(r"^\|.*\| `(?P<name>\w+)` \|$", re.M)


def drawn(text: str) -> str:
    """Return the page with the diagrams that its titles promise."""

    def draw(match: re.Match[str]) -> str:
        title, side = match["title"], match["side"]
        table = TABLES[TABLE_OF.get(title, title.lower()), Side(side)]
        return f"### {title}, on the {side}'s side\n\n```mermaid\n{diagram(table)}```\n"

    return SECTION.sub(draw, text)


def listed(text: str) -> str:
    """Return the page with the table of settings."""
    return OPTIONS.sub(lambda _match: f"\n{option_table()}\n", text)


def test_the_settings_are_those_of_the_table() -> None:
    text = CONFIGURATION.read_text()
    assert len(OPTIONS.findall(text)) == 1
    assert listed(text) == text, "run: python -m tests.hicache.test_document"


def test_the_diagrams_are_those_of_the_tables() -> None:
    text = PROTOCOL.read_text()
    assert len(SECTION.findall(text)) == 10
    assert drawn(text) == text, "run: python -m tests.hicache.test_document"


def test_the_scenarios_named_exist() -> None:
    named = ROW.findall(CONCEPTS.read_text())
    assert len(named) > 15
    assert set(named) <= set(SCENARIOS)


if __name__ == "__main__":
    PROTOCOL.write_text(drawn(PROTOCOL.read_text()))
    CONFIGURATION.write_text(listed(CONFIGURATION.read_text()))
