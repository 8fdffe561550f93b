"""Router replay as one of several ranks; started by test_router_replay.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from strop.backends.fsdp.backend import FsdpBackend
from strop.backends.megatron.backend import MegatronBackend
from strop.config.schema.model import FsdpConfig
from tests.backends.make import make_backend
from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.backends.ranks_megatron import fitting
from tests.backends.replay_checks import assert_replays

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
AGAIN_IN_PART = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.fixture(autouse=True)
def on_cpu():
    without_cuda()


@pytest.mark.parametrize("options", [{}, RECOMPUTED, AGAIN_IN_PART], ids=["kept", "full", "selective"])
@pytest.mark.parametrize("way", ["data", "tensor", "pipeline", "expert", "tensor-pipeline", "tensor-expert"])
def test_megatron(way, options):
    """In a pipeline rows are computed again after further rows."""
    sizes = replace(fitting(way), override_transformer_config=options)
    family = "deepseek_v3" if way == "data" else "qwen3_moe"
    assert_replays(partial(make_backend, ranks=here()), MegatronBackend, family, megatron=sizes)


@pytest.mark.parametrize("experts", [1, 2])
def test_fsdp(experts):
    sizes = FsdpConfig(expert_parallel_size=experts)
    assert_replays(partial(make_backend, ranks=here()), FsdpBackend, "qwen3_moe", fsdp=sizes)
