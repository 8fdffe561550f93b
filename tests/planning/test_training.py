"""Memory of the training backend by arithmetic, against its tensors and against the peak of a real update."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

from strop.backends.base import BackendSettings, MicroBatching
from strop.backends.single import SingleBackend
from strop.config.schema.model import OptimConfig
from strop.models.checkpointing import checkpoint_activations
from strop.models.residual import widen_residual
from strop.planning.activations import Numbers, Tokens
from strop.planning.shape import read_shape, shape_of
from strop.planning.training import Placement, TrainedModel
from strop.types import Batch

SIZE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
ROWS, LENGTH, PROMPT = 8, 257, 1
GIB = 2**30


class Live(TorchDispatchMode):
    """Bytes of all storage that operations made and that still exists, and the most there ever were."""

    def __init__(self, *known):
        """Storage of `known` tensors is not counted."""
        super().__init__()
        self.now = self.peak = 0
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = weakref.WeakValueDictionary({storage._cdata: storage for storage in self._known})

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage):
        if self._seen.get(storage._cdata) is storage:
            return
        size = storage.nbytes()
        self._seen[storage._cdata] = storage
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size):
        self.now -= size


def backend_of(dtype: torch.dtype, *, checkpointing: str, tied: bool) -> tuple[SingleBackend, TrainedModel]:
    config = AutoConfig.for_model("qwen2", **SIZE, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    widen_residual(model)
    checkpoint_activations(model, checkpointing)
    backend = SingleBackend(
        model, BackendSettings(optim=OptimConfig(lr=1e-6, lr_warmup_steps=0), compute=dtype)
    )
    numbers = Numbers(dtype.itemsize, 4, residual=4)
    return backend, TrainedModel(read_shape(config.to_dict()), numbers, checkpointing=checkpointing)


def batch_of(rows: int, length: int = LENGTH) -> Batch:
    draw = torch.Generator().manual_seed(0)
    return Batch(
        sequences=list(torch.randint(3, SIZE["vocab_size"], (rows, length), generator=draw)),
        prompt_lengths=torch.full((rows,), PROMPT),
        mask=torch.ones(rows, length - PROMPT),
        advantages=torch.randn(rows, length - PROMPT, generator=draw),
    )


def loss(outputs, piece):
    value = -(outputs.log_probs * piece.advantages).mean()
    return value, {"loss": value}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_weights_gradients_and_optimizer_are_those_of_the_backend(dtype):
    backend, model = backend_of(dtype, checkpointing="full", tied=True)
    assert (
        sum(p.nbytes for p in {*backend.module.parameters(), *backend.weights.masters.values()})
        == model.weights
    )
    backend.forward_backward(
        batch_of(1, length=4), ["log_probs"], loss, MicroBatching(rows=1)
    )  # whatever passes through it
    assert sum(g.nbytes for g in backend.weights.gradients) == model.gradients
    backend.step()
    moments = [t for state in backend.optimizer.state.values() for t in state.values() if t.dim()]
    assert sum(t.nbytes for t in moments) == model.optimizer


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_the_peak_of_an_update_is_foretold(checkpointing, tied, micro_batches):
    backend, model = backend_of(torch.float32, checkpointing=checkpointing, tied=tied)
    batch = batch_of(ROWS * micro_batches)
    with Live(*backend.module.parameters(), *backend.module.buffers()) as live:
        backend.forward_backward(batch, ["log_probs"], loss, MicroBatching(rows=ROWS))
    tokens = Tokens(ROWS * (LENGTH - 1), ROWS * (LENGTH - PROMPT))
    parts = model.update(tokens, accumulated=micro_batches > 1)
    assert sum(parts.values()) == pytest.approx(live.peak, rel=0.15)


def test_ranks_share_what_a_model_is_made_of():
    shape = shape_of("qwen2.5-7b")
    one, eight = TrainedModel(shape), TrainedModel(shape, placement=Placement(ranks=8, shards=8))
    assert one.weights == 6 * shape.parameters and one.optimizer == 8 * shape.parameters
    assert eight.weights == shape.parameters // 2 and eight.gradients == shape.parameters // 2
    assert eight.optimizer == shape.parameters
    hybrid = TrainedModel(shape, placement=Placement(ranks=8, shards=4))
    assert hybrid.optimizer == 2 * eight.optimizer


def test_offloaded_weights_rest_in_host_memory():
    model = TrainedModel(shape_of("qwen2.5-7b"), placement=Placement(ranks=8, shards=8, in_host=True))
    assert model.weights == model.optimizer == model.gradients == 0
    assert model.in_host == 16 * model.shape.parameters // 8
    tokens = Tokens(4096, 2048)
    assert sum(model.update(tokens, accumulated=True).values()) > 0


def test_a_frozen_model_has_weights_only():
    model = TrainedModel(shape_of("qwen2.5-7b"), Numbers(2, 2), frozen=True)
    assert model.weights == 2 * model.shape.parameters and model.optimizer == model.gradients == 0
