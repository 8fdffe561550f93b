"""Megatron's division of a model, by formulas; and the sizes that docs/scaling/large_models.md shows.
`python -m tests.planning.test_megatron` writes its table anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.config.compose import load
from strop.planning.activations import Numbers, Tokens
from strop.planning.devices import GIB, SAFE, PlannedCluster, device_of
from strop.planning.job import job_of
from strop.planning.megatron import (
    Division,
    MegatronModel,
    bubble,
    context_bytes,
    dense_share,
    expert_bytes,
    expert_share,
    last_stage_layers,
    tensor_bytes,
)
from strop.planning.parallel_sizes import SizedRun, possible_divisions, sized_runs
from strop.planning.shape import shape_of

PAGE = Path(__file__).parents[2] / "docs" / "scaling" / "large_models.md"
TABLE = re.compile(r"\| model \| GPUs \| TP x PP.*?\n\n", re.DOTALL)
MODELS = ("qwen2.5-72b", "qwen3-235b-a22b", "deepseek-v3")
GPUS = (64, 128, 256, 512)
PUBLISHED = {
    ("qwen3-235b-a22b", 64): Division(64, 4, 8, 1, 4),
    ("qwen3-235b-a22b", 128): Division(128, 4, 8, 1, 4),
    ("qwen3-235b-a22b", 256): Division(256, 4, 8, 1, 4),
    ("deepseek-v3", 128): Division(128, 8, 16, 1, 8),
    ("deepseek-v3", 256): Division(256, 8, 16, 1, 8),
    ("deepseek-v3", 512): Division(512, 1, 16, 1, 32),
}
"""The sizes of verl's page on large models, for devices of 96 GB."""
RUN = (
    "actor_rollout_ref.actor.strategy=megatron algorithm.adv_estimator=grpo data.train_batch_size=512 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=8 data.max_prompt_length=2048 "
    "data.max_response_length=8192 actor_rollout_ref.actor.use_dynamic_bsz=true "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.nnodes=8 actor_rollout_ref.rollout.n_gpus_per_node=8 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=8"
)


def runs(model: str, gpus: int, device: str = "h100", *, fitting: bool = True) -> list[SizedRun]:
    config = load("ppo_trainer", [f"actor_rollout_ref.model.path={model}", *RUN.split()]).config
    return sized_runs(config, PlannedCluster(device_of(device), gpus // 8, 8), fitting=fitting)


def sizes(of: Division) -> str:
    return f"{of.tensor} x {of.stages} x {of.context} x {of.experts}"


def row(model: str, gpus: int) -> str:
    found = runs(model, gpus)
    cells = [model, str(gpus), "nothing fits", "", ""]
    if found:
        best = found[0]
        cells[2:] = [sizes(best.division), f"{best.peak / GIB:.0f} GiB", f"{best.seconds:.0f} s"]
    published = PUBLISHED.get((model, gpus))
    theirs = ["", ""]
    if published is not None:
        [same] = [run for run in runs(model, gpus, "96GB", fitting=False) if run.division == published]
        memory = device_of("96GB").memory
        verdict = "fits" if same.peak <= SAFE * memory else "does not fit"
        theirs = [sizes(published), f"{same.peak / GIB:.0f} GiB, {verdict}"]
    return "| " + " | ".join([*cells, *theirs]) + " |"


def table() -> str:
    lines = [
        "| model | GPUs | TP x PP x CP x EP | peak | training of a step | verl's sizes (96 GB) | their peak here |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *[row(model, gpus) for model in MODELS for gpus in GPUS]]) + "\n\n"


@pytest.mark.parametrize("model", MODELS)
def test_the_shares_of_all_ranks_are_the_model(model: str) -> None:
    shape = shape_of(model)
    whole = dense_share(shape, Division(1)) + expert_share(shape, Division(1))
    assert whole == shape.parameters - shape.hidden  # without the last norm
    assert 2 * dense_share(shape, Division(2, tensor=2)) == pytest.approx(
        dense_share(shape, Division(1)), rel=1e-3
    )
    if shape.experts is not None:
        assert 8 * expert_share(shape, Division(8, experts=8)) == expert_share(shape, Division(1))


def test_the_largest_stage_counts() -> None:
    shape = shape_of("deepseek-v3")  # 61 layers
    division = Division(16, stages=16)
    assert last_stage_layers(shape, division) == 1
    assert expert_share(shape, division) == 4 * shape.expert_weights


def model(division: Division, **settings: object) -> MegatronModel:
    return MegatronModel(shape_of("qwen3-30b-a3b"), division=division, **settings)  # type: ignore[arg-type]


def test_masters_and_moments_are_divided_over_copies() -> None:
    alone = model(Division(1))
    assert alone.optimizer == 8 * alone.own and alone.gradients == 8 * alone.own
    many = model(Division(16, tensor=2, stages=2, experts=4))
    dense = dense_share(many.shape, many.division)
    experts = expert_share(many.shape, many.division)
    assert many.optimized == dense // 4 + experts // 2  # 4 copies of the model, 2 of each expert
    assert (
        model(Division(16, tensor=2), divides_optimizer=False).optimized == model(Division(16, tensor=2)).own
    )
    assert model(Division(4, tensor=4), frozen=True).weights == 2 * model(Division(4, tensor=4)).own


def test_with_lora_only_adapters_have_masters_gradients_and_moments() -> None:
    """Qwen2.5-72B, rank 32, on 16 ranks as TP 8 x PP 2: 421 million weights of adapters instead of 72.7 billion."""
    division = Division(16, tensor=8, stages=2)
    whole = MegatronModel(shape_of("qwen2.5-72b"), division=division)
    adapted = MegatronModel(shape_of("qwen2.5-72b"), division=division, lora_rank=32)
    hidden, keys, width = 8192, 1024, 29568
    column = 32 * ((hidden + hidden // 8) + 2 * (hidden + keys // 8) + 2 * (hidden + width // 8))
    row = 32 * ((hidden // 8 + hidden) + (width // 8 + hidden))
    assert adapted.trained == 421_068_800
    assert adapted.trained_here == adapted.optimized == 40 * (column + row)  # 40 layers of a stage
    assert adapted.optimizer == 8 * adapted.optimized
    assert adapted.gradients == 4 * 2 * adapted.optimized
    assert adapted.weights == 2 * (adapted.own + adapted.optimized) + 4 * adapted.optimized
    assert whole.own == adapted.own and whole.optimizer > 40 * adapted.optimizer
    tokens = Tokens(4096, 2048)
    peaks = [sum(m.update(tokens, accumulated=True).values()) for m in (whole, adapted)]
    assert peaks[0] - peaks[1] >= whole.gradients - adapted.gradients


def test_adapters_of_experts_are_divided_and_added_to_their_weights() -> None:
    """A rank has A of its own experts and B of all; the sum of weight and adapter is a copy of the experts."""
    full, none = (model(Division(4, experts=4), lora_rank=8, checkpointing=c) for c in ("full", "none"))
    assert full.experts_trained == 48 * (32 * (16 * 2048 + 8 * 768) + 128 * (16 * 1536 + 8 * 2048))
    assert full.optimized == full.experts_trained + full.dense_trained // 4
    copies = 2 * 32 * 3 * 2048 * 768
    assert full.adapted_experts == copies
    plain = model(Division(4, experts=4), checkpointing="none")
    tokens = Tokens(4096, 2048)
    assert none.kept(tokens) - plain.kept(tokens) == 48 * copies


def test_supervised_training_is_planned_by_its_strategy() -> None:
    words = [
        "model.path=qwen2.5-72b",
        "model.strategy=megatron",
        "model.megatron.tensor_model_parallel_size=8",
    ]
    config = load("sft_trainer", [*words, "model.lora_rank=32", "data.train_batch_size=64"]).config
    planned = job_of(config, PlannedCluster(device_of("h100"), 1, 8)).models["model"]
    assert isinstance(planned, MegatronModel)
    assert planned.division == Division(8, tensor=8) and planned.lora_rank == 32


def test_what_waits_in_host_memory_is_not_on_the_device() -> None:
    offloaded = model(Division(8, experts=8), offloads_weights=True, offloads_moments=True)
    assert sum(offloaded.at_rest.values()) == 0
    assert offloaded.in_host == 2 * offloaded.own + 12 * offloaded.optimized
    assert sum(offloaded.present(learns=True).values()) == offloaded.weights + offloaded.optimizer


def test_stages_keep_as_much_as_one_device_and_sequence_parallelism_less() -> None:
    """The first stage has passes of all stages under way: as many layers' inputs as without stages."""
    tokens = Tokens(4096, 2048)
    assert model(Division(4, stages=4)).kept(tokens) == model(Division(1)).kept(tokens)
    assert model(Division(4, tensor=4)).kept(tokens) == model(Division(1)).kept(tokens) // 4
    rows = model(Division(4, tensor=4), divides_rows=False)
    assert rows.kept(tokens) == model(Division(1)).kept(tokens)


def test_times_by_formulas() -> None:
    assert bubble(Division(4, stages=4), 8) == 1 + 3 / 8
    assert bubble(Division(4, stages=4, virtual=2), 8) == 1 + 3 / 16
    assert bubble(Division(4), 8) == 1
    shape, numbers = shape_of("qwen3-30b-a3b"), Numbers()
    assert tensor_bytes(shape, numbers, Division(1), 1000) == 0
    assert tensor_bytes(shape, numbers, Division(2, tensor=2), 1000) == 4 * 2 * 2048 * 1000 * 48 / 2
    assert expert_bytes(shape, numbers, Division(8, experts=8), 1000) == 2 * 8 * 2 * 2048 * 1000 * 48 * 7 / 8
    assert expert_bytes(shape_of("qwen2.5-72b"), numbers, Division(8), 1000) == 0
    states = 2 * (32 + 4) * 128
    assert context_bytes(shape, numbers, Division(2, context=2), 1000) == 2 * states * 1000 * 48 / 2


def test_sizes_divide_heads_experts_layers_and_devices() -> None:
    shape = shape_of("qwen3-235b-a22b")
    found = list(possible_divisions(shape, PlannedCluster(device_of("h100"), 16, 8)))
    assert Division(128, 4, 8, 1, 4) in found and len(set(found)) == len(found)
    for of in found:
        assert of.ranks == of.data * of.tensor * of.stages * of.context
        assert 4 % of.tensor == 0 and 128 % of.experts == 0 and (of.ranks // of.stages) % of.experts == 0


def test_runs_that_do_not_fit_are_left_out_and_the_rest_is_in_order() -> None:
    found = runs("qwen2.5-72b", 64)
    everything = runs("qwen2.5-72b", 64, fitting=False)
    assert 0 < len(found) < len(everything)
    assert all(run.peak <= SAFE * run.forecast.memory for run in found)
    assert found[0].seconds <= 1.03 * min(run.seconds for run in found)


def test_deepseek_v3_has_the_published_size() -> None:
    """671,026,419,200 weights, less 256 numbers of each of the 58 routers that are no parameters."""
    assert shape_of("deepseek-v3").parameters == 671_026_419_200 - 58 * 256
    assert shape_of("deepseek-ai/DeepSeek-R1") == shape_of("deepseek-v3")
    assert shape_of("deepseek-v3").cache_per_token(2) == 61 * 576 * 2


def test_the_page_shows_the_sizes_of_one_model() -> None:
    assert row("deepseek-v3", 64) in PAGE.read_text(), "run `python -m tests.planning.test_megatron`"


@pytest.mark.slow
def test_the_page_shows_all_sizes() -> None:
    [found] = TABLE.findall(PAGE.read_text())
    assert found == table(), "run `python -m tests.planning.test_megatron`"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
