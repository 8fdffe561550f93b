"""Greedy accuracy of a model on GSM8K: `python evaluate.py --model PATH --data test.parquet [--out
result.json]`.

Strict: the answer must stand after `#### `, as the prompt asks. Flexible: the last number of the text counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.config.schema.model import ModelConfig
from strop.data.chat import Chat, stop_ids
from strop.data.files import open_rows
from strop.models.build import build_policy, build_tokenizer, compute_dtype
from strop.rewards.rules.gsm8k import compute_score
from strop.rollout.base import Request, Sampling, build_engine
from strop.shared.build import device_of


def accuracy(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_tokens: int = 256
) -> dict[str, Any]:
    """Greedy answers to all rows with the native engine, scored both ways."""
    chat = Chat(tokenizer)
    requests = [Request(chat.ids(row["prompt"])) for row in rows]
    stops = stop_ids(tokenizer, getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    engine = build_engine("native", model)
    begun = time.perf_counter()
    found = engine.generate(
        requests, Sampling(temperature=0.0, max_tokens=max_tokens, stop_ids=tuple(sorted(stops)))
    )
    seconds = time.perf_counter() - begun
    engine.close()
    answers = [completions[0] for completions in found]
    texts = [tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers]
    truths = [row["reward_model"]["ground_truth"] for row in rows]

    def right(method: str) -> int:
        return sum(int(compute_score(text, truth, method=method)) for text, truth in zip(texts, truths))

    tokens = sum(len(answer.ids) for answer in answers)
    return {
        "problems": len(rows),
        "strict": right("strict") / len(rows),
        "flexible": right("flexible") / len(rows),
        "unfinished": sum(answer.finish == "length" for answer in answers) / len(rows),
        "mean_tokens": tokens / len(rows),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="runs/gsm8k_smollm2/data/test.parquet")
    parser.add_argument("--out", help="append the result to this file, as a line of JSON")
    parser.add_argument("--max-rows", type=int, default=-1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args(arguments)
    device = device_of(asked.device)
    settings = ModelConfig(path=asked.model)
    model = build_policy(settings).to(device, compute_dtype("bfloat16", device))
    rows = list(open_rows(asked.data))[: asked.max_rows if asked.max_rows > 0 else None]
    result = {
        "model": asked.model,
        **accuracy(model, build_tokenizer(settings), rows, max_tokens=asked.max_tokens),
    }
    print(json.dumps(result))
    if asked.out:
        Path(asked.out).parent.mkdir(parents=True, exist_ok=True)
        with Path(asked.out).open("a") as file:
            file.write(json.dumps(result) + "\n")
    return result


if __name__ == "__main__":
    main()
