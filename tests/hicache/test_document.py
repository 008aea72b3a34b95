"""The page about the cache: its state diagrams are those of the tables, and the scenarios that it names exist.

Run as a program, this rewrites the diagrams.
"""

from __future__ import annotations

import re
from pathlib import Path

from devipc.hicache.operations import TABLES, Side, diagram
from tests.hicache import test_inproc  # noqa: F401 - fills the registry
from tests.hicache.scenario import SCENARIOS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hicache.md"
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


def test_the_diagrams_are_those_of_the_tables() -> None:
    text = PAGE.read_text()
    assert len(SECTION.findall(text)) == 10
    assert drawn(text) == text, "run: python -m tests.hicache.test_document"


def test_the_scenarios_named_exist() -> None:
    named = ROW.findall(PAGE.read_text())
    assert len(named) > 15
    assert set(named) <= set(SCENARIOS)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
