"""Charts are PNG files in which every curve can be seen; without matplotlib the error says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from strop.extras import MissingExtra, install_command
from strop.quickstart import quickstart
from strop.run.chart import COLORS, line_chart

CURVES = {"training reward": [(0.0, 0.1), (1.0, 0.4), (2.0, 0.9)], "held out": [(0.0, 0.3), (2.0, 0.2)]}


def count_pixels(file: Path, color: str) -> int:
    """Pixels of the picture that have exactly this color."""
    from matplotlib import colors, image

    pixels = np.round(255 * image.imread(file)[..., :3]).astype(int)
    wanted = np.round(255 * np.array(colors.to_rgb(color))).astype(int)
    return int((pixels == wanted).all(axis=-1).sum())


def test_a_chart_shows_every_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = line_chart(tmp_path / "new" / "reward.png", CURVES, title="reward by step")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert count_pixels(file, COLORS[0]) > 100 and count_pixels(file, COLORS[1]) > 100
    assert count_pixels(file, COLORS[2]) == 0


def test_more_curves_than_colors_can_be_told_apart(tmp_path: Path) -> None:
    """The second of two curves of one color is dashed: it has fewer pixels."""
    pytest.importorskip("matplotlib")

    def pixels(first: int) -> int:
        curves = {f"run {number}": [(0.0, 0.0)] for number in range(first)}
        curves["line"] = [(0.0, 1.0), (1.0, 1.0)]
        return count_pixels(line_chart(tmp_path / f"{first}.png", curves, title="t"), COLORS[0])

    assert 100 < pixels(len(COLORS)) < 0.9 * pixels(0)


def test_without_points_there_is_no_chart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward by step: there are no points"):
        line_chart(tmp_path / "reward.png", {"reward": []}, title="reward by step")
    assert not (tmp_path / "reward.png").exists()


def test_without_matplotlib_the_quickstart_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"matplotlib.*pip install .*\[plot\]'"):
        line_chart(tmp_path / "reward.png", CURVES, title="reward by step")
    assert install_command("plot") in quickstart.draw_curve(tmp_path / "reward.png", CURVES)
    assert not (tmp_path / "reward.png").exists()
