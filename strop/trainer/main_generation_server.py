"""python -m strop.trainer.main_generation_server key=value ...: verl's generation with the keys of PPO. It is
`main_generation`, which reads the keys of both."""

from __future__ import annotations

import sys

from strop.errors import answer
from strop.shared.process_setup import prepare_process
from strop.trainer.main_generation import run

if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
