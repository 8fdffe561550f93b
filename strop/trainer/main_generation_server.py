"""python -m strop.trainer.main_generation_server key=value ...: verl's generation with the keys of PPO. It is
`main_generation`, which reads the keys of both, with the defaults of verl's program."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from strop.config.commandline import parse
from strop.config.compose import load
from strop.errors import answer
from strop.shared.process_setup import prepare_process
from strop.trainer.main_generation import run

VERL_DEFAULTS = {
    "data.n_samples": 1,
    "rollout.prompt_length": 512,
    "rollout.top_k": -1,
    "rollout.top_p": 1.0,
}
"""Those of PPO, which differ from those of `main_generation`."""


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments, and VERL_DEFAULTS for what neither they nor their file set."""
    options = parse(arguments)
    set_by_user = load("generation", options.overrides, options.config, options.search).set_by_user
    added = [f"{key}={value}" for key, value in VERL_DEFAULTS.items() if key not in set_by_user]
    return [*arguments, *added]


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(with_defaults(sys.argv[1:]))))
