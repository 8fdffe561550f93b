"""Few rows times a large weight: the kernel gives the bits of many rows, and is used where it was compared."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.forward import response_outputs
from strop.models.patches import MODEL_PATCHES, PatchContext, apply_patches
from strop.models.projections import few_rows
from strop.models.projections.divided import add_wide
from strop.models.projections.few_rows import UseFewRows
from strop.models.projections.fused import FusedProjection
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.types import Batch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the kernels on a CPU, which counts its calls; weights of any size are large."""
    found = SimpleNamespace(OUTPUTS=4, CHUNK=2, calls=0, error=0.0)

    def product(rows: Tensor, weight: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
        found.calls += 1
        pairs = zip(rows.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
        return torch.stack([(a.double() @ b.double().t() + found.error).to(dtype) for a, b in pairs])

    found.product = product
    monkeypatch.setattr(few_rows, "_LEAST_WEIGHTS", 0)
    monkeypatch.setattr(few_rows, "_DEVICES", ("cpu",))
    monkeypatch.setattr(few_rows, "_checked", {})
    monkeypatch.setattr(few_rows, "_kernels", lambda: cast(ModuleType, found))
    return found


def layers() -> list[nn.Linear]:
    return [nn.Linear(8, size, bias=False, dtype=torch.bfloat16) for size in (8, 4)]


def test_a_fused_projection_uses_the_kernel_for_few_rows_while_the_engine_samples(kernels: Any) -> None:
    product = FusedProjection(layers())
    product.lay_out()
    states = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    expected = [part(states) for part in product.layers]
    use = UseFewRows(product.whole_weight, parts=1)
    for applied in (False, True, False, True):
        if applied:
            use.do()
        kernels.calls = 0
        for found, wanted in zip(product(states), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert kernels.calls == applied
        many = states.repeat(6, 1, 1)
        product(many)
        assert kernels.calls == applied  # 36 rows are too many
        if applied:
            use.undo()
    assert len(few_rows._checked) == 1


def test_a_kernel_with_other_bits_is_not_used(kernels: Any) -> None:
    kernels.error = 0.01
    product = FusedProjection(layers())
    use = UseFewRows(product.whole_weight, parts=1)
    use.do()
    assert kernels.calls == 1  # the comparison
    product(torch.randn(3, 8, dtype=torch.bfloat16))
    assert kernels.calls == 1
    use.undo()


@pytest.mark.parametrize(
    "outputs, inputs, parts, dtype",
    [
        (6, 8, 1, torch.bfloat16),
        (8, 5, 1, torch.bfloat16),
        (8, 6, 2, torch.bfloat16),
        (8, 8, 1, torch.float32),
    ],
)
def test_what_does_not_fit_is_left_to_cublas(
    kernels: Any, outputs: int, inputs: int, parts: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(outputs, inputs, dtype=dtype)
    use = UseFewRows(lambda: weight, parts)
    assert not use.fits()
    use.do()
    assert not few_rows.takes(torch.randn(2, inputs, dtype=dtype), weight, parts)
    use.undo()


# --- on a GPU -----------------------------------------------------------------------------------------------

GATE_UP = [(17920, 1536, 1), (37888, 3584, 1), (24576, 4096, 1), (22016, 2048, 1), (6144, 4096, 1)]
ENDS = [(4096, 12288, 2), (3584, 18944, 2), (2048, 11008, 2), (4096, 4096, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("outputs, inputs, parts", GATE_UP + ENDS)
def test_few_rows_have_the_bits_that_they_have_among_many(
    outputs: int, inputs: int, parts: int, dtype: torch.dtype
) -> None:
    """The first shapes are gate and up of 1.5B, 7B, 8B and 3B, then q, k and v of 8B, then ends of branches."""
    draw = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=draw, device="cuda", dtype=dtype) * inputs**-0.5
    states = torch.randn(4096, inputs, generator=draw, device="cuda", dtype=dtype)
    stream = torch.randn(4096, outputs, generator=draw, device="cuda")

    def computed(rows: slice) -> Tensor:
        if parts == 1:
            return F.linear(states[rows], weight)
        return add_wide(stream[rows], states[rows], weight)

    together = computed(slice(None))
    use = UseFewRows(lambda: weight, parts)
    use.do()
    try:
        assert few_rows.takes(states[:32], weight, parts)
        for count in (1, 2, 7, 8, 16, 24, 32):
            for start in (0, 1000, 4096 - count):
                rows = slice(start, start + count)
                few = few_rows.product(states[rows], weight) if parts == 1 else computed(rows)
                assert torch.equal(few, together[rows]), (count, start)
    finally:
        use.undo()


@pytest.mark.gpu
def test_few_sequences_are_sampled_with_it_and_trained_with_the_same_log_probs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=512,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    apply_patches(model, MODEL_PATCHES, PatchContext(fp32_residual=True))
    used: list[int] = []
    kernels: Any = few_rows._kernels()
    plain = kernels.product

    def counted(rows: Tensor, weight: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
        used.append(len(rows))
        found: Tensor = plain(rows, weight, parts, dtype)
        return found

    monkeypatch.setattr(kernels, "product", counted)
    requests = [Request(p, n=2, seed=1) for p in ([5, 9, 2], [7, 1, 1, 4, 30, 12, 8], [11])]
    ways = Sampling(max_tokens=70)
    groups = NativeEngine(model).generate(requests, ways)
    assert 8 in used  # six sequences in a recorded step for eight
    monkeypatch.setattr(few_rows, "MOST_ROWS", 0)
    count = len(used)
    without = NativeEngine(model).generate(requests, ways)
    assert len(used) == count
    sampled = [(r.ids, c) for r, group in zip(requests, groups, strict=True) for c in group]
    others = [c for group in without for c in group]
    assert [(c.ids, c.log_probs) for _, c in sampled] == [(c.ids, c.log_probs) for c in others]
    batch = Batch(
        sequences=[torch.tensor([*prompt, *c.ids]) for prompt, c in sampled],
        prompt_lengths=torch.tensor([len(prompt) for prompt, _ in sampled]),
        mask=torch.ones(len(sampled), 70),
    )
    with torch.no_grad():
        trained = response_outputs(model, batch, ["log_probs"])["log_probs"].cpu()
    difference = (torch.tensor([c.log_probs for _, c in sampled]) - trained).abs()
    assert trained.mean() < -1 and difference.max() < 1e-5
