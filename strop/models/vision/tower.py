"""Vision towers that get the patches of all images in one row (the Qwen-VL families).

Attention stays inside an image, or inside a window of it. transformers calls its attention function once for
each of them: 450 calls per image and pass for Qwen2.5-VL. Here one call has them all: a variable-length
kernel on a GPU, and elsewhere one call per length. Patches are multiplied by the weight of the convolution
over them as one matrix product: the convolution has one place per patch, for which convolution kernels,
above all those of its gradient, are slow.

On a GPU, long products of any tower and of the projector behind it are divided (projections/divided.py), so
that the features of an image have the same bits whatever other images a pass has.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from strop.models.changes import Change, SetAttribute, SetClass, subclass
from strop.models.projections.divided import LONG, DividedLinear
from strop.models.self_check import same
from strop.models.varlen import DEVICES, DTYPES, Kernel, both_ways_kernel

TOWER = "strop_flash_tower"
"""transformers gives the borders of images to functions that have `flash` in their names."""


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Every patch attends to all patches between its two borders. [1, heads, N, D] -> [1, N, heads, D]."""
    assert attention_mask is None and not dropout, "the borders say what a patch sees"
    q = query[0].transpose(0, 1)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    kernel = _kernels.get((q.device, q.dtype, q.shape[-1]))
    if kernel is None:
        return _by_length(q, k, v, cu_seq_lens_q, scaling)[None], None
    return kernel(q, k, v, cu_seq_lens_q.to(torch.int32), max_length_q, scale=scaling)[None], None


AttentionInterface.register(TOWER, tower_attention)


def _by_length(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float | None) -> Tensor:
    """Pieces of one length are attended in one call. [N, heads, D] each, and so the result."""
    starts: dict[int, list[int]] = {}
    for begin, end in pairwise(bounds.tolist()):
        if end > begin:
            starts.setdefault(end - begin, []).append(begin)
    if len(starts) == 1:
        return _same_length(q, k, v, next(iter(starts)), scale)
    places = []
    pieces = []
    for length, begins in starts.items():
        own = (torch.tensor(begins)[:, None] + torch.arange(length)).flatten().to(q.device)
        chosen = (q.index_select(0, own), k.index_select(0, own), v.index_select(0, own))
        pieces.append(_same_length(*chosen, length, scale))
        places.append(own)
    return torch.cat(pieces).index_select(0, torch.cat(places).argsort())


def _same_length(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float | None) -> Tensor:
    def apart(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, length)).transpose(1, 2)

    out = F.scaled_dot_product_attention(apart(q), apart(k), apart(v), scale=scale)
    return out.transpose(1, 2).flatten(0, 1)


_kernels: dict[tuple[torch.device, torch.dtype, int], Kernel | None] = {}
"""The kernel for heads of a size on a device; None where it failed its check."""


def _check_kernel(device: torch.device, dtype: torch.dtype, size: int) -> None:
    """Compare the variable-length kernel, and its gradients, with one call per length."""
    kernel = both_ways_kernel()
    if device.type not in DEVICES or dtype not in DTYPES or kernel is None:
        return
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if (device, dtype, size) in _kernels:
        return
    draw = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 64, 128, 144, 400], dtype=torch.int32, device=device)
    q, k, v, above = (torch.randn(400, 2, size, generator=draw).to(device, dtype) for _ in range(4))

    def attended(by_kernel: Kernel | None) -> list[Tensor]:
        with torch.enable_grad():
            inputs = (q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_())
            if by_kernel is None:
                out = _by_length(*inputs, bounds, None)
            else:
                out = by_kernel(*inputs, bounds, 256)
            return [out, *torch.autograd.grad(out, inputs, above)]

    fits = same(lambda: attended(None), lambda: attended(kernel), name="tower")
    _kernels[device, dtype, size] = kernel if fits else None


def _project(self: nn.Conv3d, patches: Tensor) -> Tensor:
    """A convolution whose kernel covers its input."""
    assert patches.shape[2:] == self.kernel_size, (patches.shape, self.kernel_size)
    found = F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
    return found[:, :, None, None, None]


def divided_products(part: nn.Module) -> Iterator[Change]:
    """Divides the long products of all modules of `part` but the language model."""
    embeddings = cast(PreTrainedModel, part).get_input_embeddings()
    for child in part.children():
        if embeddings in child.modules():
            continue
        for module in list(child.modules()):
            if type(module) is nn.Linear and module.in_features >= LONG and "forward" not in vars(module):
                yield SetClass(module, DividedLinear)


def tower_changes(tower: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[Change]:
    """What makes a tower compute all images at once; nothing for towers of other kinds. Kernels are checked
    here, not in a pass."""
    own = cast(PreTrainedConfig, tower.config)
    # Of the attention layers alone: models are built from copies of the model's own configuration.
    changed = copy.deepcopy(own)
    changed._attn_implementation = TOWER
    for part in list(tower.modules()):
        is_product = getattr(type(part), "is_product", False)
        if isinstance(part, nn.Conv3d) and part.kernel_size == part.stride and not is_product:
            yield SetClass(part, subclass(type(part), _project, "is_product"))
        takes_borders = "cu_seqlens" in inspect.signature(part.forward).parameters
        if takes_borders and hasattr(part, "head_dim") and own._attn_implementation == "sdpa":
            _check_kernel(device, dtype, int(cast(int, part.head_dim)))
            yield SetAttribute(part, "config", changed)
