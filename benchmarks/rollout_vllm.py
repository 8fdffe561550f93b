"""vLLM alone, on work that another process hands it: the peer of benchmarks/rollout.py. Imports nothing of
Strop.

The first line of standard input is the work as JSON; a line of output says that vLLM is ready, with its
version and the seconds it took. Every further line of input is answered, after all completions were made, by
their number of tokens and the seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    work: dict[str, Any] = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    import vllm

    start = time.perf_counter()
    engine = vllm.LLM(
        work["model"],
        skip_tokenizer_init=True,
        dtype=work["dtype"],
        max_model_len=work["max_model_len"],
        max_num_seqs=work["max_num_seqs"],
        enforce_eager=work["eager"],
        gpu_memory_utilization=work["memory"],
        **{"enable_prefix_caching": True, **work["settings"]},
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
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]

    def say(**facts: Any) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    say(version=vllm.__version__, seconds=round(time.perf_counter() - start, 1))
    for _ in sys.stdin:
        start = time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        outputs = [output for answer in found for output in answer.outputs]
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        engine.reset_prefix_cache()  # each round computes its prompts, as after a weight update
        say(tokens=sum(len(output.token_ids) for output in outputs), seconds=seconds)


if __name__ == "__main__":
    main()
