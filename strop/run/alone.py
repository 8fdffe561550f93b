"""One run at a time in a folder: two would go on from each other's checkpoints and mix their metrics.

The kernel holds the lock for the process, and lets go when that ends, however it ends; processes that it starts have none.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from strop.run.heartbeat import read_beats, workers_of


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Inside the block the folder belongs to this process; a ValueError if it belongs to another that lives."""
    path = workers_of(directory) / "lock"
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.lockf(held.enter_context(path.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = next((f" ({beat})" for beat in read_beats(directory) if not beat.over), "")
            raise ValueError(
                f"trainer.default_local_dir={directory} belongs to a run that has not ended{who}. Set trainer.experiment_name "
                f"or trainer.default_local_dir to something of its own, or end that run. (If there is none, delete {path}.)"
            ) from error
        except OSError:
            pass  # a file system without locks, or one that nobody can write to, of which others tell
        yield
