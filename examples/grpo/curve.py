"""Write curves as SVG, without a plotting library. Keep this a pure function of the numbers."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 360, 48, 24, 16, 44
COLOURS = ("#0b62a4", "#c44601", "#2e7d32", "#7b1fa2", "#5d4037", "#00838f")
Points = Sequence[tuple[float, float]]


def svg(curves: Mapping[str, Points], *, title: str, x: str, goal: float | None = None) -> str:
    """Rewards from 0 to 1 over `x`, a line for each curve, and a dashed one at the goal."""
    widest = max((point[0] for points in curves.values() for point in points), default=0.0) or 1.0
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>', *axes(widest, x)]
    if goal is not None:
        parts.append(line([(0.0, goal), (widest, goal)], widest, "#888", 'stroke-dasharray="6 4"'))
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(line(points, widest, colour))
        parts += [
            f'<circle cx="{at(each, widest)[0]:.1f}" cy="{at(each, widest)[1]:.1f}" r="2.5" fill="{colour}"/>'
            for each in points
        ]
        parts.append(
            f'<text x="{WIDTH - RIGHT - 220}" y="{HEIGHT - BOTTOM - 12 - 16 * number}"'
            f' fill="{colour}">{escape(name)}</text>'
        )
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def axes(widest: float, x: str) -> list[str]:
    """Both axes with five marks each."""
    parts = []
    for mark in range(6):
        share = mark / 5
        (across, _), (_, up) = at((widest * share, 0), widest), at((0, share), widest)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up:.1f}" y2="{up:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{share:.1f}</text>')
        parts.append(
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}"'
            f' text-anchor="middle">{widest * share:.4g}</text>'
        )
    return [
        *parts,
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>',
    ]


def line(points: Points, widest: float, colour: str, more: str = "") -> str:
    places = " ".join(f"{across:.1f},{up:.1f}" for across, up in (at(each, widest) for each in points))
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2" {more}/>'


def at(point: tuple[float, float], widest: float) -> tuple[float, float]:
    """Where in the picture."""
    across, up = point
    return LEFT + (WIDTH - LEFT - RIGHT) * across / widest, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, as many as the window has."""
    return [sum(values[max(0, end - window) : end]) / min(window, end) for end in range(1, len(values) + 1)]
