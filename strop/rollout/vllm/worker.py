"""The process that hosts vLLM for a trainer of another environment.

    python -m strop.rollout.vllm.worker FD

FD is a connected socket (see wire.py). The first message has the arguments of the driver; the answer to it says that the engine
is ready. Ends when the other side is gone.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from strop.rollout.vllm.driver import Driver
from strop.rollout.vllm.wire import Wire, pack_completions, unpack_request


def main(fd: int) -> None:
    # An engine in a process of its own needs no further process, unless the user says so.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
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


def _end_with(parent: int) -> None:
    """A trainer that is killed while the engine starts, which can take minutes, must not leave it behind."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _serve(driver: Driver, wire: Wire, header: dict[str, Any], numbers: bytes) -> None:
    number, what = header["id"], header["do"]

    def reply(done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            wire.send({"id": number, "error": f"{type(error).__name__}: {error}", "refused": isinstance(error, ValueError)})
        elif what == "ask":
            found, block = pack_completions(done.result())
            wire.send({"id": number, **found}, block)
        else:
            wire.send({"id": number})

    asked = driver.ask(*unpack_request(header, numbers)) if what == "ask" else driver.call(what, *header["arguments"])
    asked.add_done_callback(reply)


if __name__ == "__main__":
    main(int(sys.argv[1]))
