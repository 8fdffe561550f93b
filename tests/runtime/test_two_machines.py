"""Two machines, each with a network of its own: ranks meet over the cable between them and train the quickstart."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.quickstart.quickstart import EXAMPLE, prepare
from tests.ppo.runs import metrics
from tests.runtime.started import Started

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
SCRIPT = str(Path(__file__).with_name("netns.sh"))
ACCURACY = "val-core/arithmetic/acc/mean@1"


@pytest.fixture
def cable() -> Iterator[str]:
    """The address of a cluster of two machines; skipped where one may not make networks."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets need short names
        up = subprocess.run(
            [SCRIPT, "up", folder], env=environment, capture_output=True, text=True, check=False
        )
        try:
            if "not permitted" in up.stderr:
                pytest.skip(up.stderr)
            assert up.returncode == 0, up.stdout + up.stderr
            yield "10.99.7.1:6399"
        finally:
            subprocess.run([SCRIPT, "down"], check=False)


def test_the_quickstart_is_learnt_by_two_machines_as_by_one(cable, tmp_path):
    prepare(tmp_path, largest=19, seed=1, say=lambda text: None)
    settings = [
        str(EXAMPLE),
        f"data.train_files={tmp_path}/data/train.parquet",
        f"data.val_files={tmp_path}/data/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "trainer.device=cpu",
        "trainer.total_training_steps=30",
        "trainer.logger=file",
    ]
    one = Started(settings, tmp_path / "one")
    assert one.end() == 0, one.said()
    far = ["trainer.nnodes=2", f"ray_kwargs.ray_init.address={cable}"]
    two = Started([*settings, *far], tmp_path / "two", before=[SCRIPT, "run"], RAY_AUTH_MODE="disabled")
    assert two.end(600) == 0, two.said()
    alone, together = metrics(one.folder), metrics(two.folder)
    steps = max(alone)
    assert together[steps][ACCURACY] == pytest.approx(alone[steps][ACCURACY], abs=0.03)
    assert together[steps][ACCURACY] > together[0][ACCURACY] + 0.1
