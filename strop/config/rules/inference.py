"""Rules of generation, evaluation, the reward server and the training service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.derived import engine_name
from strop.config.rules.actor import four_bit_weights
from strop.config.rules.findings import Findings, error, warning
from strop.config.rules.rollout import installed_engine, possible_speculation, quantized_engine

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.inference import EvaluationConfig, GenerationConfig, RewardServerConfig
    from strop.config.schema.training_service import TrainingServiceConfig


def generation(loaded: Loaded[GenerationConfig]) -> Findings:
    """Paths are set, one machine is used, several samples need a temperature, and the engine is installed."""
    config = loaded.config
    required = {
        "model.path": config.model.path,
        "data.path": config.data.path,
        "data.output_path": config.data.output_path,
    }
    for key, value in required.items():
        if not value:
            yield error(key, "not set.")
    output = config.data.output_path
    if output and not output.endswith(".parquet"):
        yield error("data.output_path", f"{output} must end in .parquet.")
    if config.trainer.nnodes > 1:
        yield error(
            "trainer.nnodes",
            f"{config.trainer.nnodes}, but generation runs on the devices of one machine. Divide the file "
            "and start one job per machine, with an output_path each.",
        )
    if config.rollout.temperature == 0 and config.data.n_samples > 1:
        yield error(
            "data.n_samples",
            f"{config.data.n_samples} samples at temperature 0 would all be the same. Set data.n_samples=1.",
        )
    samples = config.rollout.n
    if samples not in (1, config.data.n_samples):
        yield error(
            "rollout.n",
            f"{samples}, but data.n_samples={config.data.n_samples} is the number of responses per prompt. "
            f"Set data.n_samples={samples} instead.",
        )
    size = config.rollout.tensor_model_parallel_size
    engine = engine_name(config.rollout)
    if size > 1 and engine in ("native", "hf"):
        yield warning(
            "rollout.tensor_model_parallel_size",
            f"{size} has no effect: with rollout.name={engine} every device holds the whole model.",
        )
    yield from installed_engine("rollout", config.rollout)
    yield from possible_speculation("rollout", config.rollout)
    yield from quantized_engine("rollout", config.rollout, config.trainer.device)
    yield from four_bit_weights("model", config.model, 1)  # every device has the whole model


def evaluation(loaded: Loaded[EvaluationConfig]) -> Findings:
    """Evaluation reads a file of responses."""
    if not loaded.config.data.path:
        yield error("data.path", "not set. Name a parquet file with responses (`strop generate` makes one).")


def reward_server(loaded: Loaded[RewardServerConfig]) -> Findings:
    """The server needs a reward model."""
    if not loaded.config.model.path:
        yield error("model.path", "not set. Name the folder of a reward model (`strop rm` makes one).")


def training_service(loaded: Loaded[TrainingServiceConfig]) -> Findings:
    """The service needs a model, and its limits must agree."""
    config = loaded.config
    if not config.model.path:
        yield error("model.path", "not set. Name the folder of the model that users train adapters of.")
    server = config.server
    if server.max_adapters_per_user > server.max_adapters:
        yield error(
            "server.max_adapters_per_user",
            f"{server.max_adapters_per_user} is more than server.max_adapters={server.max_adapters}, the "
            "adapters that fit on the device.",
        )
