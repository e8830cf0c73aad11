"""Draw the chain of values and what makes each of them: `python docs/draw_architecture.py` writes architecture.svg.

Boxes are values, arrows are passes with the package that holds them. The grey bands say what each part may do: decide,
lower, carry out.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

OUT = Path(__file__).parent / "architecture.svg"
WIDTH, HEIGHT = 1200, 640
BOX_WIDTH, BOX_HEIGHT = 186, 62


class Value(NamedTuple):
    """A box: the value's name, what it holds, and its centre."""

    name: str
    holds: tuple[str, ...]
    x: int
    y: int
    fill: str = "#ffffff"


class Pass(NamedTuple):
    """An arrow between two values, by their numbers: its name, its packages, and by how much its text is moved."""

    source: int
    target: int
    name: str
    packages: str
    dx: int = 0
    dy: int = -12


HANDED_OVER = "#ffe9b8"
BANDS = (
    ("decides", 20, 340, "autopar/compiler"),
    ("lowers", 350, 490, "autopar/compiler"),
    ("carries out", 500, 630, "autopar/runtime"),
)
VALUES = (
    Value("train step", ("a function, its arguments",), 120, 100),
    Value("Trace", ("jaxpr, names, state, batch",), 443, 100),
    Value("PreparedStep", ("one microbatch, phases",), 766, 100),
    Value("StageGraph", ("a stage per layer",), 1080, 100),
    Value("StageCost, ...", ("of layers, per submesh",), 1080, 260),
    Value("Partition", ("ranges of layers, submeshes",), 600, 260),
    Value("Plan", ("every decision, as JSON",), 120, 260, HANDED_OVER),
    Value("StageGraph", ("a stage per range: F B W U",), 320, 425),
    Value("Program", ("run, send, recv, free",), 766, 425, HANDED_OVER),
    Value("results", ("jax.Array, one process",), 320, 580),
    Value("results", ("of a cluster of processes",), 766, 580),
    Value("Timeline", ("seconds, bytes: on paper",), 1080, 580),
)
PASSES = (
    Pass(0, 1, "trace_step", "frontend"),
    Pass(1, 2, "prepare", "microbatch, pipeline"),
    Pass(2, 3, "cut_stages", "pipeline"),
    Pass(3, 4, "layouts of a layer, by integer programming", "intra_op, costs, memory, solver", -150, -2),
    Pass(4, 5, "stages, by dynamic programming", "inter_op"),
    Pass(5, 6, "layouts of a stage, by integer programming", "planning, intra_op, costs, solver"),
    Pass(6, 7, "cut_step", "pipeline", 66, -22),
    Pass(7, 8, "lower_step", "lowering, spmd, resharding"),
    Pass(8, 9, "in_process", "runtime", -43, 40),
    Pass(8, 10, "distributed", "runtime", 48, 16),
    Pass(8, 11, "simulator", "runtime", 7, 40),
)


def draw() -> str:
    """The picture as the text of an SVG file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L10 5 L0 10 z" fill="#345"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for name, top, bottom, note in BANDS:
        parts.append(f'<rect x="8" y="{top}" width="{WIDTH - 16}" height="{bottom - top}" rx="8" fill="#f1f4f7"/>')
        parts.append(_text(22, top + 22, name, 15, "#345", weight="bold", anchor="start"))
        parts.append(_text(22, top + 40, note, 12, "#678", anchor="start"))
    parts += [_arrow(each) for each in PASSES]
    parts += [_box(value) for value in VALUES]
    return "\n".join([*parts, "</svg>\n"])


def _box(value: Value) -> str:
    left, top = value.x - BOX_WIDTH // 2, value.y - BOX_HEIGHT // 2
    lines = [
        f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{value.fill}" '
        'stroke="#345" stroke-width="1.5"/>',
        _text(value.x, value.y - 4, value.name, 16, "#123", weight="bold"),
    ]
    lines += [_text(value.x, value.y + 16 + 14 * n, line, 12, "#456") for n, line in enumerate(value.holds)]
    return "\n".join(lines)


def _arrow(each: Pass) -> str:
    a, b = VALUES[each.source], VALUES[each.target]
    (x1, y1), (x2, y2) = _border(a, b), _border(b, a)
    x, y = (x1 + x2) // 2 + each.dx, (y1 + y2) // 2 + each.dy
    return "\n".join(
        [
            f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#345" stroke-width="1.6" marker-end="url(#head)"/>',
            _text(x, y, each.name, 13, "#123"),
            _text(x, y + (32 if y1 == y2 else 16), each.packages, 12, "#678"),
        ]
    )


def _border(value: Value, other: Value) -> tuple[int, int]:
    """Where an arrow leaves a box: at the side if the other one is level with it, else at its top or bottom."""
    if value.y == other.y:
        return value.x + (BOX_WIDTH // 2 if other.x > value.x else -BOX_WIDTH // 2), value.y
    return value.x, value.y + (BOX_HEIGHT // 2 if other.y > value.y else -BOX_HEIGHT // 2)


def _text(x: int, y: int, words: str, size: int, colour: str, *, weight: str = "normal", anchor: str = "middle") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
