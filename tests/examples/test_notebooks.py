"""The notebooks run from an empty folder, offline, and the models in them learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent.parent / "examples" / "notebooks"
FILES = sorted(FOLDER.glob("*.ipynb"))


class Kernel:
    """One process for all notebooks, which imports torch once; each notebook starts with no variables."""

    def __init__(self, client: NotebookClient) -> None:
        self.client = client

    def run(self, name: str, folder: Path) -> nbformat.NotebookNode:
        """Execute the cells of a notebook in `folder`; an error in a cell is raised here."""
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        self._execute(nbformat.v4.new_notebook(cells=[_cell(f"%reset -f\n%cd -q {folder}")]))
        self._execute(notebook)
        return notebook

    def value(self, expression: str) -> object:
        """A value of the last notebook, as JSON holds it."""
        code = f"import json as _json\nprint(_json.dumps({expression}))"
        (cell,) = self._execute(nbformat.v4.new_notebook(cells=[_cell(code)])).cells
        return json.loads(cell.outputs[-1].text)

    def _execute(self, notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
        self.client.nb = notebook
        self.client.reset_execution_trackers()
        for index, cell in enumerate(notebook.cells):
            self.client.execute_cell(cell, index)
        return notebook


def _cell(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(source)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(variable, str(home / variable.lower()))
        patch.setenv("OMP_NUM_THREADS", "1")
        client = NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3", timeout=300)
        with client.setup_kernel():
            yield Kernel(client)


def has_picture(notebook: nbformat.NotebookNode) -> bool:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return any("image/png" in output.get("data", {}) for output in outputs)


def rise(scores: list[float]) -> float:
    """From the first quarter of the steps to the last."""
    quarter = len(scores) // 4
    return mean(scores[-quarter:]) - mean(scores[:quarter])


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_committed_notebook_is_valid_and_has_no_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"clear the outputs: {cell.source}"


def test_the_readme_lists_every_notebook() -> None:
    text = (FOLDER / "README.md").read_text()
    assert len(FILES) >= 4
    for file in FILES:
        assert f"({file.name})" in text


@pytest.mark.slow
def test_quickstart(kernel: Kernel, tmp_path: Path) -> None:
    notebook = kernel.run("quickstart", tmp_path)
    assert rise(kernel.value("run.metrics['critic/score/mean']")) > 0.2  # type: ignore[arg-type]
    before, after = kernel.value("[before['score'], after['score']]")  # type: ignore[misc]
    assert after > before + 0.2 and after > 0.7
    assert has_picture(notebook)
    assert kernel.value("run.finished") is True


@pytest.mark.slow
def test_own_reward(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("own_reward", tmp_path)
    assert kernel.value("scores") == dict.fromkeys(("plain", "batched", "waiting", "compute_score"), 0.5)
    assert kernel.value("tested.rows[0]['scores']") == [1.0, 0.0]
    columns = ("critic/score/mean", "reward/correct/mean", "reward/two_characters/mean")
    total, correct, two = (kernel.value(f"run.metrics['{name}']") for name in columns)
    assert total == pytest.approx([c + 0.2 * t for c, t in zip(correct, two, strict=True)])  # type: ignore[call-overload]
    assert rise(total) > 0.1  # type: ignore[arg-type]
    assert "solution" in kernel.value("refused")  # type: ignore[operator]


@pytest.mark.slow
def test_own_tool(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("own_tool", tmp_path)
    called = kernel.value("run.metrics['reward/called/mean']")
    score = kernel.value("run.metrics['critic/score/mean']")
    assert called[0] < 0.5 and called[-1] > called[0] + 0.2  # type: ignore[index]
    assert score[-1] > score[0] + 0.2  # type: ignore[index]
    best = kernel.value("[row['response'] for row in run.samples() if row['score'] == 1]")
    assert best and all("<tool>" in response for response in best), best  # type: ignore[attr-defined]


@pytest.mark.slow
def test_sft_to_dpo(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("sft_to_dpo", tmp_path)
    losses = kernel.value("learned.metrics['train/loss']")
    assert losses[-1] < losses[0] / 2  # type: ignore[index]
    margins = kernel.value("preferred.metrics['train/reward_margin']")
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0.2  # type: ignore[index]
    scores = kernel.value("scores")
    assert scores["DPO"]["correct"] > 0.7  # type: ignore[index]
    assert scores["DPO"]["brief"] > scores["SFT"]["brief"] + 0.2  # type: ignore[index]
