"""Line charts as PNG files, drawn by matplotlib (the optional extra `strop[plot]`) without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.extras import require

COLORS = ("#1f5ab4", "#d66014", "#288c3c", "#8c3cb4", "#b41e3c", "#14a0b4")
STYLES = ("-", "--", ":")
"""Line colors in the order of the curves; after the last one they repeat in the next style."""
SIZE_INCHES = (7.2, 4.0)
DPI = 100


def line_chart(
    file: str | Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str = "step",
) -> Path:
    """Draw named curves of (x, y) points into a PNG file and return its path.

    Raises `MissingExtra`, which says what to install, where matplotlib is missing.
    """
    if not any(curves.values()):
        raise ValueError(f"{title}: there are no points to draw.")
    figure_module = require("matplotlib.figure", extra="plot", why="A chart")
    agg = require("matplotlib.backends.backend_agg", extra="plot", why="A chart")

    # Figure and canvas without pyplot: no global state, and the user's choice of a backend stays.
    figure = figure_module.Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    canvas = agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curves.items()):
        xs = [x for x, _ in points]
        ys = [y for _, y in points]
        color = COLORS[number % len(COLORS)]
        style = STYLES[number // len(COLORS) % len(STYLES)]
        axes.plot(xs, ys, color=color, linestyle=style, label=name)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.3)
    axes.legend()

    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(path)
    return path
