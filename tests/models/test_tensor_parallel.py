"""Which models can be divided, how, and what is said about the others. That divided models compute the same is tested by ranks
(tests/backends/ranks_fsdp.py, tests/runtime/ranks_loop.py)."""

from __future__ import annotations

import pytest

from strop.models.heads import new_scalar_model
from strop.models.lora import add_adapters
from strop.models.tensor_parallel import INPUTS, OUTPUTS, PER_HEAD, Slice, plan_of
from tests.models.tiny import tiny_model


def test_every_matrix_of_a_layer_is_divided_and_no_other():
    plan = plan_of(tiny_model("qwen3"), 2)
    first = {name.rsplit(".", 1)[-1]: style for name, style in plan.items() if ".layers.0." in name}
    assert first == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), OUTPUTS),
        **dict.fromkeys(("o_proj", "down_proj"), INPUTS),
        **dict.fromkeys(("q_norm", "k_norm"), PER_HEAD),
    }
    assert len(plan) == 2 * len(first) and not any("lm_head" in name or "embed" in name for name in plan)


def test_value_models_are_divided_like_language_models():
    critic = new_scalar_model(tiny_model().config)
    assert plan_of(critic, 2) == plan_of(tiny_model(), 2)


def test_slices_of_all_ranks_are_the_whole():
    weight = tiny_model().model.layers[0].mlp.down_proj.weight
    parts = [Slice(1, part, 3).of(weight) for part in range(3)]
    assert [part.shape for part in parts] == [(32, 16)] * 3
    assert (parts[2] == weight[:, 32:]).all()


def test_what_cannot_be_divided_is_refused():
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=4 does not divide the 2 key-value heads.*one of \[1, 2\]"
    ):
        plan_of(tiny_model(), 4)
    key = "rollout.tensor_model_parallel_size"
    with pytest.raises(ValueError, match=f"^{key}=2 does not divide the 47 outputs of gate_proj"):
        plan_of(tiny_model(intermediate_size=47), 2, key)
    with pytest.raises(
        ValueError, match=r"MixtralForCausalLM divides its layers in ways that are not supported.*experts"
    ):
        plan_of(tiny_model("mixtral"), 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not go together with LoRA"):
        plan_of(add_adapters(tiny_model(), rank=2, alpha=4), 2)
    model = tiny_model()
    model.tp_plan = None
    with pytest.raises(ValueError, match="no tensor-parallel plan for LlamaForCausalLM"):
        plan_of(model, 2)
