"""A policy over several ranks: the driver's script calls an operation, and every rank runs it.

Ranks are processes of this machine (`LocalWorkers`) or Ray actors. The model is sharded by FSDP2, prompts are
shared between the engines of the ranks, and the result of the first rank is returned.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strop.backends.base import Outputs
from strop.backends.updates import StepSettings
from strop.config.schema.ppo import PpoConfig
from strop.policy.batches import StepOutput
from strop.policy.core import PolicyFacts
from strop.policy.worker import PolicyWorker
from strop.ppo.sampler import NumberedPrompt
from strop.ranks import SharedFailure
from strop.rollout.base import Sampling
from strop.runtime.local import RankProcess, StartedRanks, start_ranks
from strop.runtime.remote_backend import TrainingWorkers
from strop.types import Batch, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strop.runtime.ray.model_actors import RayTrainingWorkers

ROLE = "policy"
POLL_SECONDS = 0.2
AFTER_FAILURE_SECONDS = 10.0
"""Seconds that other ranks have to answer after one has failed: they may wait for it in a collective."""
EXIT_SECONDS = 5.0
"""Seconds until the exit code of a rank is known whose connection has closed."""
ENDED = "The ranks of this policy have ended. Make a new one, and load its state."


class PolicyRankLost(Exception):
    """A rank of a policy has ended, or does not answer after another one failed. The policy is gone."""


class LocalWorkers:
    """Ranks of a policy as processes of this machine."""

    def __init__(self, world: int) -> None:
        self.world = world
        # Deleted at the latest when this process ends: a script may leave its policy open.
        self._temporary = tempfile.TemporaryDirectory(prefix="strop-policy-", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        self._ranks: StartedRanks | None = None
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        listener = socket.socket(socket.AF_UNIX)
        listener.settimeout(POLL_SECONDS)
        listener.bind(str(self._folder / "socket"))
        listener.listen(world)
        try:
            self._ranks = self.start(str(self._folder / "socket"))
            self._connections = self._accept(listener)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def start(self, address: str) -> StartedRanks:
        """Start the processes."""
        command = [sys.executable, "-m", "strop.policy.worker", address]
        return start_ranks(command, self.world, self._folder, environment={"PYTHONPATH": _python_path()})

    def _accept(self, listener: socket.socket) -> list[Connection]:
        """The connections of all ranks, in order."""
        found: dict[int, Connection] = {}
        while len(found) < self.world:
            try:
                channel, _ = listener.accept()
            except TimeoutError:
                self._refuse_dead()
                continue
            channel.settimeout(None)
            connection = Connection(channel.detach())
            found[int(connection.recv_bytes())] = connection
        return [found[rank] for rank in range(self.world)]

    def call(self, method: str, *arguments: object) -> Any:
        """Run an operation on every rank and return the result of the first one. Later calls wait: they would
        take the answers to this one.

        A thread exchanges the messages. Ctrl-C ends only the wait for it: with half of a message sent or
        read, the ranks would take the next one for the rest.
        """
        done: Future[tuple[dict[int, object], dict[int, Exception]]] = Future()

        def exchange() -> None:
            try:
                with self._lock:
                    done.set_result(self._call_all(method, arguments))
            except Exception as error:  # noqa: BLE001 - raised below
                done.set_exception(error)

        threading.Thread(target=exchange, name=f"strop-policy-{method}", daemon=True).start()
        results, errors = done.result()
        if errors:
            known = [error for error in errors.values() if not isinstance(error, SharedFailure)]
            raise (known or list(errors.values()))[0]
        return results[0]

    def _call_all(
        self, method: str, arguments: Sequence[object]
    ) -> tuple[dict[int, object], dict[int, Exception]]:
        if not self._connections:
            raise PolicyRankLost(ENDED)
        message = pickle.dumps((method, arguments))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise self._lost(rank) from error
        return self._answers()

    def _answers(self) -> tuple[dict[int, object], dict[int, Exception]]:
        """What each rank answered."""
        results: dict[int, object] = {}
        errors: dict[int, Exception] = {}
        deadline = math.inf
        waiting = dict(zip(self._connections, range(self.world), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=POLL_SECONDS)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    error, result = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError) as lost:
                    raise self._lost(rank) from lost
                del waiting[connection]
                results[rank] = result
                if error is not None:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_SECONDS)
            if waiting and time.monotonic() > deadline:
                self.close()
                first = next(iter(errors.values()))
                raise _left_waiting(min(errors), min(waiting.values()), first) from first
        return results, errors

    def _refuse_dead(self) -> None:
        assert self._ranks is not None
        for rank, process in enumerate(self._ranks.processes):
            if process.poll() is not None:
                raise self._lost(rank)

    def _lost(self, rank: int) -> PolicyRankLost:
        """End all ranks, because this one has ended."""
        lines: Sequence[str] = ()
        end = "exit code unknown"
        if self._ranks is not None:
            end = _end_of(self._ranks.processes[rank])
            lines = self._ranks.tails[rank].last_lines()
        self.close()
        return PolicyRankLost(
            f"Rank {rank} of {self.world} has ended ({end}), and the policy with it. Its last lines: "
            f"{' / '.join(lines[-5:]) or 'none'}"
        )

    def close(self) -> None:
        """End the ranks: they stop when their connection closes."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._ranks is not None:
            self._ranks.end()
        self._temporary.cleanup()


def _end_of(process: RankProcess) -> str:
    """How a process ended. Its connection closes a moment before its exit code can be read."""
    try:
        code = process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return "exit code unknown"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _left_waiting(failed: int, waiting: int, error: Exception) -> PolicyRankLost:
    """A rank failed alone. The others never come back from the collective in which they wait for it."""
    return PolicyRankLost(
        f"Rank {failed} failed and rank {waiting} waits for it; the policy has ended. "
        f"{type(error).__name__}: {error}"
    )


class RayWorkers:
    """Ranks of a policy as Ray actors. When one is lost, all of them end, as those of `LocalWorkers`."""

    def __init__(self, workers: RayTrainingWorkers, close: Callable[[], None]) -> None:
        """`close` ends the actors."""
        self._workers = workers
        self._close = close
        self._ended = False

    def call(self, method: str, *arguments: object) -> Any:
        """Run an operation on every rank and return the result of the first one."""
        from strop.runtime.ray.model_actors import TrainingWorkerLost

        if self._ended:
            raise PolicyRankLost(ENDED)
        try:
            return self._workers.call(method, *arguments)
        except TrainingWorkerLost as lost:
            self._end()
            raise PolicyRankLost(f"The policy has ended. {lost}") from lost
        except Exception as error:
            waiting = self._workers.unanswered
            if not waiting:
                raise
            self._end()
            raise _left_waiting(self._workers.first_failed, min(waiting), error) from error

    def _end(self) -> None:
        self._ended = True
        self._close()


def _python_path() -> str:
    """Ranks find the same package as this process."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


class RankedCore:
    """The operations of `PolicyCore`, on every rank."""

    def __init__(self, config: PpoConfig, *, ray: bool) -> None:
        self._open = ExitStack()
        self._workers = self._start(config, ray)
        try:
            self._workers.call("make", config)
            self.config: PpoConfig = self._workers.call("configuration")
        except BaseException:
            self._open.close()
            raise

    def _start(self, config: PpoConfig, ray: bool) -> TrainingWorkers:
        if not ray:
            workers = LocalWorkers(config.trainer.n_gpus_per_node)
            self._open.callback(workers.close)
            return workers
        import dataclasses

        from strop.runtime.ray.cluster import RayCluster
        from strop.runtime.ray.model_actors import RayTrainingWorkers

        with ExitStack() as stack:
            cluster = stack.enter_context(RayCluster(config, dataclasses.asdict(config)))
            variables = stack.enter_context(cluster.workers(ROLE, PolicyWorker))
            found = RayTrainingWorkers(ROLE, "runtime='ray'", variables)
            self._open.push(stack.pop_all())
        # A script may leave its policy open, and Ray ends before this object does.
        atexit.register(self._open.close)
        return RayWorkers(found, self._open.close)

    def facts(self) -> PolicyFacts:
        found: PolicyFacts = self._workers.call("facts")
        return found

    def adapter_names(self) -> list[str]:
        return list(self._workers.call("adapter_names"))

    def add_adapter(self, name: str, rank: int, alpha: float, seed: int) -> None:
        self._workers.call("add_adapter", name, rank, alpha, seed)

    def load_adapter(self, name: str, path: Path) -> None:
        self._workers.call("load_adapter", name, path.absolute())

    def remove_adapter(self, name: str) -> None:
        self._workers.call("remove_adapter", name)

    def publish(self, name: str, adapter: str) -> None:
        self._workers.call("publish", name, adapter)

    def publish_folder(self, name: str, folder: Path) -> None:
        self._workers.call("publish_folder", name, folder.absolute())

    def unpublish(self, name: str) -> None:
        self._workers.call("unpublish", name)

    def sample(
        self,
        prompts: Sequence[NumberedPrompt],
        sampling: Sampling,
        n: int,
        seed: int,
        call: int,
        adapter: str | None,
    ) -> list[Trajectory]:
        return list(self._workers.call("sample", prompts, sampling, n, seed, call, adapter))

    def forward(self, batch: Batch, want: Sequence[str], adapter: str, reference: bool = False) -> Outputs:
        found: Outputs = self._workers.call("forward", batch, list(want), adapter, reference)
        return found

    def evaluate(
        self, batch: Batch, loss: str, settings: Mapping[str, object], aggregation: str | None, adapter: str
    ) -> StepOutput:
        found: StepOutput = self._workers.call("evaluate", batch, loss, settings, aggregation, adapter)
        return found

    def forward_backward(
        self, batch: Batch, loss: str, settings: Mapping[str, object], aggregation: str | None, adapter: str
    ) -> StepOutput:
        found: StepOutput = self._workers.call(
            "forward_backward", batch, loss, settings, aggregation, adapter
        )
        return found

    def backward_own(self, *_: object) -> None:
        """A function stays in the driver, so its gradients need a second pass."""

    def backward_gradients(self, batch: Batch, gradients: Mapping[str, Tensor], adapter: str) -> StepOutput:
        found: StepOutput = self._workers.call("backward_gradients", batch, gradients, adapter)
        return found

    def optim_step(self, settings: StepSettings, adapter: str) -> dict[str, float]:
        return dict(self._workers.call("optim_step", settings, adapter))

    def drop_gradients(self, adapter: str) -> None:
        self._workers.call("drop_gradients", adapter)

    def save_state(self, path: Path, adapter: str, counters: Mapping[str, int]) -> None:
        self._workers.call("save_state", path.absolute(), adapter, counters)

    def load_state(self, path: Path, adapter: str, optimizer: bool) -> dict[str, int]:
        return dict(self._workers.call("load_state", path.absolute(), adapter, optimizer))

    def save_for_sampling(self, path: Path, adapter: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._workers.call("save_for_sampling", path.absolute(), adapter, tokenizer)

    def close(self) -> None:
        self._open.close()
        atexit.unregister(self._open.close)
