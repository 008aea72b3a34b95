"""Draws GB/s over page size, with the floor: ``python -m benchmarks.plot FILE --out FILE.svg``.

Reads what ``benchmarks/h200.sh`` leaves. One line for each kind of allocation and direction.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 60, 30, 190, 50
COLOURS = {"one": "#1f77b4", "layers": "#2ca02c", "classic": "#d62728"}
NAMES = {"one": "one allocation", "layers": "one a layer", "classic": "classic, one a plane"}
DASHES = {"backup": "", "restore": "6 3"}


def points(results: dict[str, Any], allocation: str, direction: str) -> list[tuple[int, float]]:
    """Return (tokens in a page, GB/s) of one line."""
    rows = [row for step in (allocation, f"{allocation}_1") for row in results.get(step, {}).get("results", [])]
    mine = [row for row in rows if row["method"] == "cache" and row["direction"] == direction]
    mine = [row for row in mine if row.get("in_flight", 1) == 1]
    return sorted((row["page_tokens"], row["gb_per_s"]) for row in mine)


def draw(results: dict[str, Any]) -> str:
    """Return the picture as SVG."""
    lines = {(a, d): points(results, a, d) for a in NAMES for d in DASHES}
    pages = sorted({x for line in lines.values() for x, _ in line})
    rows = results["one"]["results"]
    floor: float = statistics.median(row["floor_gb_per_s"] for row in rows if row["direction"] in DASHES)
    top: int = 10 * math.ceil(floor * 1.05 / 10)
    span = math.log2(pages[-1] / pages[0]) or 1.0

    def x_of(page: int) -> float:
        return float(LEFT) + math.log2(page / pages[0]) / span * (WIDTH - LEFT - RIGHT)

    def y_of(rate: float) -> float:
        return float(HEIGHT - BOTTOM) - rate / top * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'

    def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
        return f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" {style}/>'

    right = WIDTH - RIGHT
    parts = [text((LEFT + right) / 2, HEIGHT - 12, "tokens in a page"), text(LEFT - 34, TOP - 12, "GB/s", "start")]
    parts += [text(x_of(page), HEIGHT - BOTTOM + 18, str(page)) for page in pages]
    for rate in range(0, top + 1, 10):
        parts.append(line(LEFT, y_of(rate), right, y_of(rate), 'stroke="#ddd"'))
        parts.append(text(LEFT - 8, y_of(rate) + 4, str(rate), "end"))
    parts.append(line(LEFT, y_of(floor), right, y_of(floor), 'stroke="#000" stroke-dasharray="2 3"'))
    parts.append(text(right + 8, y_of(floor) + 4, f"contiguous copy, {floor:.1f}", "start"))
    for number, ((allocation, direction), some) in enumerate(lines.items()):
        style = f'fill="none" stroke="{COLOURS[allocation]}" stroke-width="2" stroke-dasharray="{DASHES[direction]}"'
        places = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in some)
        parts.append(f'<polyline points="{places}" {style}/>')
        at = HEIGHT - BOTTOM - 18 * (len(lines) - number)
        parts.append(line(right + 8, at - 4, right + 32, at - 4, style))
        parts.append(text(right + 38, at, f"{NAMES[allocation]}, {direction}", "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif"'
    return "\n".join(
        [f'{head} font-size="11">', '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""]
    )


def main() -> None:
    """Read a run and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.write_text(draw(json.loads(options.results.read_text())["steps"]))


if __name__ == "__main__":
    main()
