"""How a run begins: examined once, then trained by this process, or by as many ranks as the configuration asks for."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from strop.config.compose import Loaded
from strop.config.pools import pools
from strop.errors import CRASHED
from strop.ranks import Ranks
from strop.run.alone import alone
from strop.run.heartbeat import beating
from strop.run.nsys import INSIDE, under_nsys
from strop.run.watchdog import Limits, watched
from strop.runtime.failure import Loss
from strop.runtime.local import LAUNCHED, is_rank, joined, run_ranks
from strop.runtime.replica import Recipe
from strop.runtime.restarts import supervise
from strop.trainer.preflight import Report, examine, require

Train = Callable[[Loaded, Ranks, Report | None], None]


def start(loaded: Loaded, program: str, arguments: Sequence[str], train: Train) -> int:
    """Examine and train. `program` is the module that makes a rank of itself when it is started with the same `arguments`."""
    command, ray = [sys.executable, "-m", program, *arguments], uses_ray(loaded.config)
    if is_rank():
        if ray or LAUNCHED not in os.environ:  # whoever started it was not under nsys
            under_nsys(command, loaded.config, int(os.environ["RANK"]))
        return _as_rank(loaded, train)
    if not ray:
        under_nsys(command, loaded.config)
    report = require(loaded)
    with alone(Path(loaded.config.trainer.default_local_dir).expanduser()):
        return _begin(loaded, program, arguments, train, report)


def _begin(loaded: Loaded, program: str, arguments: Sequence[str], train: Train, report: Report) -> int:
    """Train a run that was examined: in this process, in ranks of this machine, or on a cluster."""
    trainer = loaded.config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    directory = Path(trainer.default_local_dir).expanduser()
    if uses_ray(loaded.config):
        from strop.runtime.ray import Cluster
        from strop.trainer.frozen import frozen_models, learning_models

        config = loaded.config
        with Cluster(config, loaded.tree(), _recipe(config), frozen_models(config), learning_models(config)) as cluster:
            return supervise(lambda more: cluster.run(program, [*arguments, *more]), directory, trainer.max_restarts)
    if trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={trainer.nnodes} with trainer.runtime=local: one command starts the ranks of one machine. Set "
            f"trainer.runtime=ray, or start `torchrun --nnodes ... -m {program} ...` on each of them."
        )
    if devices == 1 and not trainer.max_restarts:
        with beating(directory) as heart, watched(heart, _limits(trainer)):
            train(loaded, Ranks(), report)
        return 0

    def attempt(more: Sequence[str]) -> Loss | None:
        return run_ranks([sys.executable, "-m", program, *arguments, *more], devices, directory)

    return supervise(attempt, directory, trainer.max_restarts)


def uses_ray(config: Any) -> bool:
    """trainer.runtime, where auto means Ray for several machines, or when a cluster was named."""
    trainer = config.trainer
    if trainer.runtime != "auto":
        return trainer.runtime == "ray"
    return (
        trainer.nnodes > 1
        or bool(pools(config))
        or bool(config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS"))
    )


def _recipe(config: Any) -> Recipe | None:
    """What rollout replicas are made of, where they have machines of their own."""
    if "rollout" not in pools(config):
        return None
    from strop.trainer.build import engine_settings
    from strop.trainer.pool import recipe_for

    return recipe_for(config, engine_settings(config.actor_rollout_ref.rollout))


def _as_rank(loaded: Loaded, train: Train) -> int:
    from strop.trainer.build import device_of

    config = loaded.config
    devices, device = config.trainer.nnodes * config.trainer.n_gpus_per_node, device_of(config.trainer.device)
    section: Any = getattr(config, "actor_rollout_ref", None)
    timeout = 600.0 if section is None else float(section.nccl_timeout)
    directory, rank = Path(config.trainer.default_local_dir).expanduser(), int(os.environ["RANK"])
    # A rank that started itself again under nsys is a child of that.
    starter = os.getppid() if INSIDE in os.environ else int(os.environ[LAUNCHED]) if LAUNCHED in os.environ else None
    owner = alone(directory) if rank == 0 and LAUNCHED not in os.environ else nullcontext()
    with owner, beating(directory, rank, devices) as heart, watched(heart, _limits(config.trainer), starter):
        try:
            with joined(devices, device, timeout=timeout) as ranks:
                if not ranks.lead:  # one of them tells what all of them do
                    logging.getLogger("strop").setLevel(logging.ERROR)
                if LAUNCHED not in os.environ:
                    ranks.together(lambda: require(loaded) if ranks.lead else examine(loaded), "examining the run")
                train(loaded, ranks, None)
        except (ValueError, OSError):
            raise
        except Exception:  # noqa: BLE001 - the border of a rank: its starter tells a mistake of the user from a crash by the code
            traceback.print_exc()
            raise SystemExit(CRASHED) from None
    return 0


def _limits(trainer: Any) -> Limits:
    return Limits(warning=trainer.phase_warning, timeout=trainer.phase_timeout)
