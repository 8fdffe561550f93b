"""python -m strop.trainer.main_serve_train model.path=DIR server.port=8900: a training service over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from strop.config.commandline import parse
from strop.config.compose import load
from strop.errors import answer
from strop.registry import load_plugins
from strop.shared.process_setup import prepare_process


def run(arguments: Sequence[str]) -> int:
    """Compose, examine, serve until a signal stops the process."""
    options = parse(arguments)
    loaded = load("training_service", options.overrides, options.config, options.search)
    from strop.preflight.examine import require

    require(loaded)
    load_plugins(loaded.config.plugins)
    from strop.serve.start import serve

    serve(loaded.config)
    return 0


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
