"""Muon for matrices with AdamW for all other weights, as one optimizer (optim.optimizer=Muon)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon

NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe", "score", "v_head", "value_head")
"""Parts of the names of embeddings and output heads, whose rows are not mixed by a matrix product."""


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon updates this weight: a matrix inside the network, or a LoRA factor of one."""
    if weight.dim() != 2 or min(weight.shape) < 2:
        return False
    return not any(part in piece for piece in name.split(".") for part in NOT_HIDDEN)


class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices (Jordan et al., 2024), AdamW for the rest.

    The updates of a matrix are scaled to the size of AdamW's (Moonlight, 2025), so that both share `lr` and
    `weight_decay`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ) -> None:
        """Each group says with `muon` who updates its weights."""
        adamw: dict[str, Any] = {"betas": betas, "eps": eps}
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "muon": False, "fused": True, **adamw})
        settings: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self._parts: list[Optimizer] = []
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        if matrices:
            part = TorchMuon(_copies(matrices), lr=lr, adjust_lr_fn="match_rms_adamw", **settings)
            self._adopt(part, matrices)
        if others:
            self._adopt(AdamW(_copies(others), lr=lr, fused=True, **adamw), others)

    def _adopt(self, part: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Make a part of this optimizer work on its groups and its state."""
        for group, made in zip(groups, part.param_groups, strict=True):
            for name, value in made.items():
                group.setdefault(name, value)
            if group["muon"]:  # AdamW's is another number
                group["eps"] = made["eps"]
        part.param_groups = groups
        part.state = self.state
        self._parts.append(part)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self._parts:
            part.step()


def _copies(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]


def muon_groups(named: Mapping[str, Tensor], decay: Callable[[Tensor], float]) -> list[dict[str, Any]]:
    """The groups of `Muon` over these tensors."""
    sorts: dict[tuple[bool, float, object], list[Tensor]] = {}
    for name, tensor in named.items():
        key = (is_hidden_matrix(name, tensor), decay(tensor), getattr(tensor, "device_mesh", None))
        sorts.setdefault(key, []).append(tensor)
    return [
        {"params": tensors, "weight_decay": weight_decay, "muon": matrices}
        for (matrices, weight_decay, _), tensors in sorts.items()
    ]
