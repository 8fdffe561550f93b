"""vLLM alone, on work that another process hands it: the peer of benchmarks/rollout.py. Imports nothing of
Strop.

The first line of standard input is the work as JSON; a line of output says that vLLM is ready, with its
version and the seconds it took. Every further line of input is answered, after all completions were made, by
their number of tokens and the seconds. With `picture_side` in the work every prompt has a picture of its own:
vLLM's processor prepares it in the first round, its features are computed in every round.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from vision_pictures import load_processor_without_videos, prompts_with_pictures, stand_in_for_torchvision


class RowWatch:
    """The most requests that run at a time, looked up ten times a second; None if the engine is in another
    process."""

    def __init__(self, engine: Any) -> None:
        core = getattr(engine.llm_engine.engine_core, "engine_core", None)
        self._scheduler = getattr(core, "scheduler", None)
        self._most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while self._scheduler is not None and not self._end.wait(0.1):
            self._most = max(self._most, len(self._scheduler.running))

    def most(self) -> int | None:
        self._end.set()
        self._thread.join()
        return None if self._scheduler is None else self._most


def main() -> None:
    work: dict[str, Any] = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    side = work.get("picture_side")  # None: text only
    replaced = side is not None and stand_in_for_torchvision(work["model"])
    import vllm

    start = time.perf_counter()
    if replaced:
        load_processor_without_videos()
    limit: dict[str, Any] = {}
    if work["cache_bytes"] is not None:
        limit["kv_cache_memory_bytes"] = work["cache_bytes"]
    engine = vllm.LLM(
        work["model"],
        skip_tokenizer_init=side is None,
        dtype=work["dtype"],
        max_model_len=work["max_model_len"],
        max_num_seqs=work["max_num_seqs"],
        enforce_eager=work["eager"],
        gpu_memory_utilization=work["memory"],
        **{"enable_prefix_caching": True, **limit, **work["settings"]},
    )
    settings: dict[str, Any] = {
        "n": work["samples"],
        "temperature": 1.0,
        "ignore_eos": work["ignore_eos"],
        "stop_token_ids": work["stop_ids"],
        "logprobs": 0,
        "detokenize": False,
    }
    if hasattr(vllm.SamplingParams, "flat_logprobs"):  # its fastest form of log-probs
        settings["flat_logprobs"] = True
    sampling = [vllm.SamplingParams(max_tokens=limit, **settings) for limit in work["limits"]]
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in work["prompts"]]
    if side is not None:
        prompts = prompts_with_pictures(work["prompts"], side)

    def say(**facts: Any) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    say(version=vllm.__version__, seconds=round(time.perf_counter() - start, 1))
    most = work["warm_up_tokens"]  # None: as many as in the other rounds
    for turn, _ in enumerate(sys.stdin):
        now = sampling
        if turn == 0 and most is not None:
            now = [vllm.SamplingParams(max_tokens=min(limit, most), **settings) for limit in work["limits"]]
        watch = RowWatch(engine)
        start = time.perf_counter()
        found = engine.generate(prompts, now, use_tqdm=False)
        seconds = time.perf_counter() - start
        rows = watch.most()
        outputs = [output for answer in found for output in answer.outputs]
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        engine.reset_prefix_cache()  # each round computes its prompts, as after a weight update
        if side is not None:
            engine.llm_engine.reset_encoder_cache()  # and the features of its pictures
        tokens = sum(len(output.token_ids) for output in outputs)
        say(tokens=tokens, seconds=seconds, rows_in_flight=rows)


if __name__ == "__main__":
    main()
