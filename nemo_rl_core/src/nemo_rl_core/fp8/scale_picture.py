# SPDX-License-Identifier: Apache-2.0
"""A picture of scales by layer, as SVG: a line for each kind, on a logarithmic axis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from nemo_rl_core.fp8.calibration_report import Row

__all__ = ["scale_picture"]

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 64, 56
#: Colours that stay apart for readers who see few colours, with a shape each.
_COLOURS: Mapping[str, str] = {"q": "#d55e00", "k": "#0072b2", "v": "#009e73"}
_MOST_TICKS = 24


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """Where layers and scales stand; ``low`` and ``high`` are logarithms to base 10."""

    layers: Sequence[int]
    low: float
    high: float

    def x(self, layer: int) -> float:
        first, last = self.layers[0], self.layers[-1]
        inside = _WIDTH - _LEFT - _RIGHT
        # A single layer stands in the middle.
        return _LEFT + inside * ((layer - first + 0.5) / (last - first + 1))

    def y(self, scale: float) -> float:
        share = (math.log10(scale) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def scale_picture(rows: Sequence[Row], numbers: Mapping[str, int], title: str) -> str:
    """Return an SVG document.

    Args:
        rows: What is shown; at least one.
        numbers: Live module to the number of its layer.
        title: What stands on top.
    """
    layers = sorted(set(numbers.values()))
    logs = [math.log10(row.scale) for row in rows]
    # Room on both sides, so that nothing stands on an edge and equal scales have an axis too.
    axes = _Axes(layers=layers, low=min(logs) - 0.1, high=max(logs) + 0.1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
    ]
    parts += _grid(axes)
    kinds = [kind for kind in _COLOURS if any(row.kind == kind for row in rows)]
    for place, kind in enumerate(kinds):
        points = sorted((numbers[row.owner], row) for row in rows if row.kind == kind)
        parts += _line(
            kind, [(axes.x(layer), axes.y(row.scale), f"{row.owner}, {kind}: {row.scale:.6g}") for layer, row in points]
        )
        at = _LEFT + 70 * place
        parts += [_mark(kind, at + 5, 46), f'<text x="{at + 16}" y="50">{kind}</text>']
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(axes: _Axes) -> list[str]:
    """Return axes, ticks and names."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value in _ticks(axes.low, axes.high):
        y = axes.y(value)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    step = -(-len(axes.layers) // _MOST_TICKS)
    for layer in axes.layers[::step]:
        x = axes.x(layer)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="#888"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{layer}</text>')
    middle = (_TOP + bottom) / 2
    return [
        *parts,
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>',
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">layer</text>',
        f'<text x="20" y="{middle}" text-anchor="middle" transform="rotate(-90 20 {middle})">scale (log)</text>',
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers: 1, 2 and 5 of each decade, or where decades are many the decades alone."""
    heads = (1, 2, 5) if high - low < 3 else (1,)
    decades = range(math.floor(low), math.ceil(high) + 1)
    found = [head * 10.0**decade for decade in decades for head in heads]
    inside = [value for value in found if low <= math.log10(value) <= high]
    # Between two round numbers there may be none.
    return inside if len(inside) > 1 else [float(f"{10.0**at:.3g}") for at in (low, (low + high) / 2, high)]


def _line(kind: str, points: Sequence[tuple[float, float, str]]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    line = f'<polyline points="{path}" fill="none" stroke="{_COLOURS[kind]}" stroke-width="1.5" stroke-opacity="0.6"/>'
    return [line, *(_mark(kind, x, y, note) for x, y, note in points)]


def _mark(kind: str, x: float, y: float, note: str = "") -> str:
    title = f"<title>{escape(note)}</title>" if note else ""
    if kind == "k":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_COLOURS[kind]}">{title}</circle>'
    shape = {"q": f"M{x:.1f} {y - 5:.1f}l5 9h-10z", "v": f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z"}[kind]
    return f'<path d="{shape}" fill="{_COLOURS[kind]}">{title}</path>'
