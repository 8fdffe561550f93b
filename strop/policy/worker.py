"""One rank of a policy in a process of its own: a `PolicyCore` that does what the driver asks for.

Started by `strop/policy/ranked.py`, as a Ray actor or as `python -m strop.policy.worker SOCKET`.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

from strop.config.schema.ppo import PpoConfig
from strop.policy.core import PolicyCore
from strop.runtime.local import joined
from strop.runtime.remote_backend import RankWorker
from strop.shared.build import device_of


class PolicyWorker(RankWorker):
    """Runs the operations of a policy, in lockstep with the other ranks."""

    core: PolicyCore

    def __init__(self) -> None:
        self._stack = ExitStack()

    def make(self, config: PpoConfig) -> None:
        """Join the other ranks and build the model."""
        timeout = float(config.actor_rollout_ref.nccl_timeout)
        world = int(os.environ["WORLD_SIZE"])
        group = joined(world, device_of(config.trainer.device), timeout=timeout)
        self.core = PolicyCore(config, self._stack.enter_context(group))

    def run_method(self, method: str, arguments: Sequence[object]) -> object:
        """Run an operation of the policy. Only the first rank returns its result."""
        if method == "make":
            self.make(*arguments)  # type: ignore[arg-type] # the caller's contract
            return None
        result: object = getattr(self.core, method)(*arguments)
        if method == "close":
            self._stack.close()
        elif not self.core.ranks.is_rank0:
            return None
        return result


def serve(connection: Connection, worker: PolicyWorker) -> None:
    """Answer the driver until it closes the connection."""
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        error: Exception | None = None
        result: object = None
        try:
            result = worker.run_method(method, arguments)
        except Exception as problem:  # noqa: BLE001 - raised in the driver
            error = problem
        connection.send_bytes(_answer(error, result))


def _answer(error: Exception | None, result: object) -> bytes:
    if error is not None:
        try:
            return pickle.dumps((error, None))
        except (pickle.PicklingError, TypeError, AttributeError):
            error = RuntimeError(f"{type(error).__name__}: {error}")
    return pickle.dumps((error, result))


def main(address: str) -> None:
    """One rank; `address` is a socket of the driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which closes its ranks
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    connection = Connection(channel.detach())
    connection.send_bytes(os.environ["RANK"].encode())
    serve(connection, PolicyWorker())


if __name__ == "__main__":
    main(sys.argv[1])
