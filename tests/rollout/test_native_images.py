"""Images in the native engine: sampled log-probs are those that training recomputes, prefixes are shared only
under the same pictures."""

from __future__ import annotations

import pytest
import torch

from strop.models.forward import response_outputs
from strop.rollout.base import Request, Sampling, build_engine
from tests.models.vision.test_passes import batch_of_rows, rows_of
from tests.models.vision.tiny_vlm import FAMILIES, tiny_vlm

NATIVE = [family for family in FAMILIES if family != "gemma3"]


def gap(model: object, requests: list[Request], name: str, **settings: object) -> float:
    """The largest difference between sampled and recomputed log-probs."""
    engine = build_engine(name, model, **settings)
    sampling = Sampling(max_tokens=7, temperature=0.8)
    answers = engine.generate(requests, sampling)
    rows = []
    found = []
    for request, completions in zip(requests, answers, strict=True):
        for completion in completions:
            assert completion.error is None, completion.error
            rows.append((list(request.ids), request.images, completion.ids))
            found.append(torch.tensor(completion.log_probs))
    batch = batch_of_rows(rows)
    with torch.no_grad():
        outputs = response_outputs(model, batch, ["log_probs"], temperature=0.8)["log_probs"]
    return max(float((line[: len(own)] - own).abs().max()) for line, own in zip(outputs, found, strict=True))


def requests_of(family: str, n: int = 3) -> list[Request]:
    rows = rows_of(family)
    return [Request(rows[i][0], n, seed=i, images=rows[i][1]) for i in (0, 3, 5, 7)]


@pytest.mark.parametrize("family", NATIVE)
def test_sampled_log_probs_are_recomputed(family: str) -> None:
    model = tiny_vlm(family)
    requests = requests_of(family)
    assert gap(model, requests, "native", max_model_len=128) < 1e-5
    small = {"max_num_batched_tokens": 5, "max_num_seqs": 4}
    assert gap(model, requests, "native", max_model_len=128, **small) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_engine_takes_images(family: str) -> None:
    assert gap(tiny_vlm(family), requests_of(family, 2), "hf", max_model_len=128) < 1e-5
