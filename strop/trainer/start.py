"""How a run begins: examined once, then trained by this process, or by as many ranks as the configuration asks for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from strop.config.compose import Loaded
from strop.ranks import Ranks
from strop.trainer.preflight import Report, examine, require

Train = Callable[[Loaded, Ranks, Report | None], None]


def start(loaded: Loaded, program: str, arguments: Sequence[str], train: Train) -> int:
    """Examine and train. `program` is the module that makes a rank of itself when it is started with the same `arguments`."""
    from strop.runtime.local import is_rank, launch

    if is_rank():
        return _as_rank(loaded, train)
    report = require(loaded)
    devices = loaded.config.trainer.nnodes * loaded.config.trainer.n_gpus_per_node
    if devices == 1:
        train(loaded, Ranks(), report)
        return 0
    if loaded.config.trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={loaded.config.trainer.nnodes}: one command starts the ranks of one machine. Start "
            f"`torchrun --nnodes ... -m {program} ...` on each of them."
        )
    return launch([sys.executable, "-m", program, *arguments], devices)


def _as_rank(loaded: Loaded, train: Train) -> int:
    from strop.runtime.local import LAUNCHED, joined
    from strop.trainer.build import device_of

    config = loaded.config
    devices, device = config.trainer.nnodes * config.trainer.n_gpus_per_node, device_of(config.trainer.device)
    section: Any = getattr(config, "actor_rollout_ref", None)
    timeout = 600.0 if section is None else float(section.nccl_timeout)
    with joined(devices, device, timeout=timeout) as ranks:
        if not ranks.lead:  # one of them tells what all of them do
            logging.getLogger("strop").setLevel(logging.ERROR)
        if LAUNCHED not in os.environ:
            ranks.together(lambda: require(loaded) if ranks.lead else examine(loaded), "examining the run")
        train(loaded, ranks, None)
    return 0
