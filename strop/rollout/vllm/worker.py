"""The subprocess that hosts vLLM for a trainer with another Python environment.

    python -m strop.rollout.vllm.worker FD

FD is a connected socket (see wire.py). The first message has the arguments of the Driver; the reply to it
says that the engine is ready. The process ends when the trainer's side is gone.
"""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import Future

from strop.rollout.base import Completion
from strop.rollout.vllm.driver import Driver
from strop.rollout.vllm.wire import Header, Wire, pack_completions, unpack_request


def main(fd: int) -> None:
    """Start the engine and serve messages until the trainer's side is gone."""
    # The engine already has its own process, so vLLM needs no further one, unless the user sets it.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    wire = Wire(socket.socket(fileno=fd))
    first = wire.receive()
    if first is None:
        return
    try:
        driver = Driver(first[0]["arguments"], first[0]["seeded"])
    except (ValueError, OSError) as error:
        wire.send({"refused": str(error)})
        return
    wire.send({"ready": driver.log_probs})
    while (message := wire.receive()) is not None:
        _serve(driver, wire, *message)
    driver.close()


def _serve(driver: Driver, wire: Wire, header: Header, numbers: bytes) -> None:
    message_id = header["id"]

    def fail(error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}"
        wire.send({"id": message_id, "error": message, "refused": isinstance(error, ValueError)})

    def reply_completions(done: Future[list[Completion]]) -> None:
        error = done.exception()
        if error is not None:
            fail(error)
            return
        found, block = pack_completions(done.result())
        wire.send({"id": message_id, **found}, block)

    def reply_done(done: Future[object]) -> None:
        error = done.exception()
        if error is not None:
            fail(error)
            return
        wire.send({"id": message_id})

    if header["command"] == "generate":
        driver.submit(*unpack_request(header, numbers)).add_done_callback(reply_completions)
    else:
        driver.call(header["command"], *header["arguments"]).add_done_callback(reply_done)


if __name__ == "__main__":
    main(int(sys.argv[1]))
