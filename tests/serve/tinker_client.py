"""The unmodified Tinker client against a service; run by the interpreter of .venv-tinker, see test_tinker.py.

tinker_client.py URL MODEL TOKEN ...     a line of JSON per phase: losses, alone, together, step ..., crash
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import tinker
from tinker import types

LOSSES: list[tuple[str, dict[str, float] | None]] = [
    ("cross_entropy", None),
    ("importance_sampling", None),
    ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
    ("cispo", None),
    ("dro", {"beta": 0.1}),
]
ADAM = types.AdamParams(learning_rate=0.01, weight_decay=0.1, eps=1e-4, grad_clip_norm=0.5)
TOKENS = [[5, 6, 7, 8, 30, 31], [9, 10, 11, 12]]
WEIGHTS = [[0.0, 1.0, 2.0, 0.5, 1.0, -1.0], [1.0, 0.0, 0.25, 1.0]]
CRASH_STEPS = 6


def say(phase: str, content: Any) -> None:
    print(json.dumps({"phase": phase, "content": content}), flush=True)


def data_of(loss: str, shift: int = 0) -> list[types.Datum]:
    found = []
    for tokens, weights in zip(TOKENS, WEIGHTS, strict=True):
        ids = [token + shift for token in tokens]
        inputs: dict[str, Any] = {"target_tokens": [*ids[1:], 40 + shift]}
        if loss == "cross_entropy":
            inputs["weights"] = weights
        else:
            inputs["advantages"] = weights
            inputs["logprobs"] = [-4.4 - 0.1 * place for place in range(len(ids))]
        found.append(types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs))
    return found


def rows(output: Any) -> list[list[float]]:
    return [datum["logprobs"].tolist() for datum in output.loss_fn_outputs]


def custom(data: Any, log_probs: Any) -> Any:
    return sum((values**2).sum() for values in log_probs), {"custom": 1.0}


def losses(service: tinker.ServiceClient, name: str) -> None:
    """Each loss with one step on an adapter of its own; weights before and after are saved for a comparison."""
    found = {}
    for loss, settings in [*LOSSES, ("custom", None)]:
        model = service.create_lora_training_client(base_model=name, rank=4, seed=11)
        before = model.save_weights_for_sampler("before").result().path
        if loss == "custom":
            output = model.forward_backward_custom(data_of("cross_entropy"), custom).result()
        else:
            output = model.forward_backward(data_of(loss), loss, settings).result()  # type: ignore[arg-type]
        model.optim_step(ADAM).result()
        after = model.save_weights_for_sampler("after").result().path
        score = service.create_sampling_client(model_path=after).compute_logprobs(
            types.ModelInput.from_ints(TOKENS[0])
        )
        found[loss] = {
            "loss": output.metrics["loss:sum"],
            "log_probs": rows(output),
            "before": before,
            "after": after,
            "scores": score.result()[1:],
        }
    say("losses", found)


def user_run(service: tinker.ServiceClient, name: str, number: int) -> dict[str, Any]:
    """What one user does; everything is seeded by his number."""
    model = service.create_lora_training_client(base_model=name, rank=2 + 2 * number, seed=number)
    trained, sampled, tokens = [], [], []
    for step in range(3):
        data = data_of("cross_entropy", shift=number)
        passed = model.forward_backward(data, "cross_entropy")
        model.forward_backward(data[:1], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=0.01 * (1 + number)))
        trained.append(rows(passed.result()))
        stepped.result()
        sampler = model.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=6, seed=100 * number + step, temperature=0.8)
        prompt = types.ModelInput.from_ints([5 + number, 6, 7])
        samples = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
        tokens.append([one.tokens for one in samples.sequences])
        sampled += [value for one in samples.sequences for value in one.logprobs]
        trained.append(samples.prompt_logprobs)
    return {"trained": trained, "tokens": tokens, "sampled": sampled}


def users(services: list[tinker.ServiceClient], name: str) -> None:
    alone = [user_run(service, name, number) for number, service in enumerate(services)]
    say("alone", alone)
    together: list[Any] = [None] * len(services)

    def run(number: int) -> None:
        together[number] = user_run(services[number], name, number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(services))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say("together", together)


def crash(service: tinker.ServiceClient, name: str, phase: str) -> None:
    """A training run that reports each step; somebody may kill the service meanwhile."""
    model = service.create_lora_training_client(base_model=name, rank=4, seed=3)
    found: list[Any] = []
    for step in range(CRASH_STEPS):
        futures = [model.forward_backward(data_of("cross_entropy", shift=step), "cross_entropy")]
        futures.append(model.forward_backward(data_of("cross_entropy", shift=step + 1), "cross_entropy"))
        stepped = model.optim_step(types.AdamParams(learning_rate=0.01))
        sampler = model.save_weights_and_get_sampling_client()
        say("step", step)
        params = types.SamplingParams(max_tokens=4, seed=step)
        sampled = sampler.sample(types.ModelInput.from_ints([5, 6]), 2, params).result()
        found += [rows(future.result()) for future in futures]
        found.append([one.tokens for one in sampled.sequences])
        stepped.result()
    say(phase, found)


def main() -> None:
    url, name, *tokens = sys.argv[1:]
    services = [tinker.ServiceClient(base_url=url, api_key=token) for token in tokens]
    losses(services[0], name)
    users(services, name)
    crash(services[0], name, "uninterrupted")
    say("kill", None)
    crash(services[0], name, "interrupted")
    stranger = tinker.ServiceClient(base_url=url, api_key="tml-unknown-0123456789")
    try:
        stranger.get_server_capabilities()
    except tinker.AuthenticationError as error:
        say("stranger", str(error))


if __name__ == "__main__":
    main()
