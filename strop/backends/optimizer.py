"""The optimizer of a backend: learning-rate schedules, loss scaling for float16, master weights, and
optimizer state by parameter name.

A schedule is a pure function step -> factor of the base rate. `step` counts from 0: the factor at `step` is
what the (step + 1)-th update uses. Warm-up rises as (step + 1) / warmup_steps, so the first update already
moves the weights. With a `compat` whose warm-up starts from 0 it is step / warmup_steps (first update at
`init_ratio`, which is 0), and a cosine rises again past `total_steps`, where ours stays at the floor.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle

from strop.backends.adamw8bit import AdamW8bit
from strop.backends.muon import Muon, muon_groups
from strop.catalog import SCHEDULES
from strop.compat import Compat, conventions
from strop.config.schema.model import OptimConfig
from strop.registry import load_attribute

# --- learning-rate schedules --------------------------------------------------------------------------------


def constant(step: int, *, warmup_steps: int = 0, init_ratio: float = 0.0, compat: Compat = None) -> float:
    """Warm-up, then 1."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, init_ratio, compat)
    return 1.0


def cosine(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    init_ratio: float = 0.0,
    num_cycles: float = OptimConfig.num_cycles,
    compat: Compat = None,
) -> float:
    """Warm-up, then (1 + m)/2 + (1 - m)/2 · cos(2π · num_cycles · p), p the share of the steps after it, m =
    min_ratio."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, init_ratio, compat)
    progress = _progress(step, warmup_steps, total_steps, bounded=conventions(compat).warmup != "from 0")
    return _cosine(progress, min_ratio, num_cycles)


def linear(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    init_ratio: float = 0.0,
    compat: Compat = None,
) -> float:
    """Warm-up, then a straight line from 1 to min_ratio at total_steps."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, init_ratio, compat)
    return 1.0 - (1.0 - min_ratio) * _progress(step, warmup_steps, total_steps)


def wsd(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    init_ratio: float = 0.0,
    stable_ratio: float = 0.9,
    num_cycles: float = OptimConfig.num_cycles,
    compat: Compat = None,
) -> float:
    """Warm-up, stable, decay (MiniCPM): 1 for `stable_ratio` of the steps after warm-up, then a cosine to
    min_ratio."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, init_ratio, compat)
    decay_from = warmup_steps + int(stable_ratio * (total_steps - warmup_steps))
    if step < decay_from:
        return 1.0
    if step >= total_steps:
        return min_ratio
    return _cosine(_progress(step, decay_from, total_steps), min_ratio, num_cycles)


def warmup_length(total_steps: int, *, steps: int = -1, ratio: float = 0.0, compat: Compat = None) -> int:
    """Warm-up steps: `steps` if it is not negative (0 means none), else that share of the whole run."""
    if steps >= 0:
        return steps
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(
            f"The warm-up ratio must lie between 0 and 1, it is {ratio}; or set lr_warmup_steps."
        )
    if conventions(compat).warmup_length == "rounded up":
        return math.ceil(ratio * total_steps)
    return int(ratio * total_steps)


def make_scheduler(optimizer: Optimizer, name: str, *, compat: Compat = None, **settings: float) -> LambdaLR:
    """A torch scheduler over the schedule `name`.

    Settings that this schedule does not take are ignored, so one configuration serves all schedules.
    """
    for setting in ("min_ratio", "init_ratio", "stable_ratio"):
        if not 0.0 <= settings.get(setting, 0.0) <= 1.0:
            raise ValueError(f"{setting} must lie between 0 and 1, it is {settings[setting]}.")
    if settings.get("total_steps", 1) < 1 or settings.get("warmup_steps", 0) < 0:
        raise ValueError(
            f"A schedule needs total_steps >= 1 and warmup_steps >= 0, got {settings.get('total_steps')} and "
            f"{settings.get('warmup_steps')}; `warmup_length` turns a ratio into steps."
        )
    schedule = SCHEDULES.get(name)
    taken = inspect.signature(schedule).parameters
    strange = sorted(settings.keys() - taken.keys() - inspect.signature(wsd).parameters.keys())
    if strange:
        raise ValueError(f"The schedule {name!r} takes {sorted(set(taken) - {'step'})}, not {strange}.")
    if "total_steps" in taken and "total_steps" not in settings:
        raise ValueError(f"The schedule {name!r} needs total_steps: the number of updates of the whole run.")
    chosen = {**settings, "compat": compat}
    factor = partial(schedule, **{key: value for key, value in chosen.items() if key in taken})
    return LambdaLR(optimizer, factor)


def _warmup(step: int, warmup_steps: int, init_ratio: float, compat: Compat) -> float:
    if conventions(compat).warmup == "from 1/n":
        step += 1
    done = step / max(1, warmup_steps)
    return init_ratio + (1.0 - init_ratio) * done


def _progress(step: int, start: int, end: int, *, bounded: bool = True) -> float:
    done = (step - start) / max(1, end - start)
    if bounded:
        return min(done, 1.0)
    return done


def _cosine(progress: float, min_ratio: float, num_cycles: float) -> float:
    wave = math.cos(2 * math.pi * num_cycles * progress)
    return max(min_ratio, (1.0 + min_ratio) / 2 + (1.0 - min_ratio) / 2 * wave)


def advance(schedule: LambdaLR) -> None:
    """The next step of a schedule. A skipped update (or a trainer step without one, as in critic warm-up)
    makes torch warn about the order of optimizer and scheduler."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        schedule.step()


def set_schedule(schedule: LambdaLR, step: int) -> None:
    """Go to `step` of a schedule, as after a resume."""
    schedule.last_epoch = step
    schedule._step_count = step + 1
    groups = schedule.optimizer.param_groups
    for group, factor, base in zip(groups, schedule.lr_lambdas, schedule.base_lrs, strict=True):
        group["lr"] = base * factor(step)
    schedule._last_lr = [group["lr"] for group in groups]


# --- master weights -----------------------------------------------------------------------------------------
#
# The module computes with weights in the compute precision (usually bf16). The optimizer updates master
# weights in the master precision (fp32), because an update of 1e-6 relative size vanishes when it is added to
# a bf16 number. Gradients of micro-batches are summed in the master precision as they appear, one parameter
# at a time. Where both precisions are the same, a weight is its own master.


class MasterWeights:
    """The trained parameters of a module by name, each with its master copy."""

    def __init__(
        self,
        module: nn.Module,
        *,
        compute: torch.dtype,
        master: torch.dtype,
        keep: frozenset[str] = frozenset(),
    ):
        """Casts the module's parameters to `compute`, except those named in `keep`; buffers and 4-bit weights
        stay as they are."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.masters: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        for name, parameter in module.named_parameters():
            narrow = compute
            if name in keep:
                narrow = master
            if not parameter.is_floating_point():
                continue
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(narrow)
                continue
            copy = parameter.detach().to(master)
            self.parameters[name] = parameter
            if narrow == master:
                parameter.data = copy
                self.masters[name] = parameter
            else:
                parameter.data = copy.to(narrow)
                self.masters[name] = copy.requires_grad_()
                self._hooks.append(parameter.register_post_accumulate_grad_hook(_sum_into(copy)))

    def release(self) -> None:
        """The module's parameters have gradients of their own again."""
        for hook in self._hooks:
            hook.remove()

    @property
    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def gradient_norm(self) -> float:
        """Euclidean norm of all gradients together, in fp32."""
        if not self.gradients:
            return 0.0
        norms = torch._foreach_norm(self.gradients, 2, dtype=torch.float32)
        return float(torch.linalg.vector_norm(torch.stack(list(norms))))

    @torch.no_grad()
    def multiply_gradients(self, factor: float) -> None:
        torch._foreach_mul_(self.gradients, factor)

    @torch.no_grad()
    def clip(self, norm: float, limit: float | None) -> None:
        """Scale the gradients so that their norm is at most `limit`."""
        if limit is not None and norm > limit:
            self.multiply_gradients(limit / norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the module's weights."""
        targets = []
        sources = []
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                targets.append(self.parameters[name].data)
                sources.append(master)
        if targets:
            torch._foreach_copy_(targets, sources)

    def clear_gradients(self) -> None:
        for name, master in self.masters.items():
            master.grad = None
            self.parameters[name].grad = None

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(tensors[name])
        self.publish()

    def to(self, device: torch.device | str) -> None:
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.data = master.data.to(device)
                master.grad = None if master.grad is None else master.grad.to(device)


def _sum_into(master: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add


# --- the optimizer ------------------------------------------------------------------------------------------

BUILT_IN: Mapping[str, type[Optimizer]] = {"Muon": Muon, "AdamW8bit": AdamW8bit}
"""Optimizers of this package, by the name in optim.optimizer, unless optim.optimizer_impl is set."""


def make_optimizer(named: Mapping[str, Tensor], settings: OptimConfig) -> Optimizer:
    """The optimizer of `settings` over these tensors. Biases and norms (one dimension) get no weight
    decay."""

    def decay_of(tensor: Tensor) -> float:
        return settings.weight_decay if tensor.dim() > 1 else 0.0

    cls = optimizer_class(settings)
    # One kernel takes many tensors at once, but not tensors that are sharded over different device meshes.
    sorts: dict[tuple[float, object], list[Tensor]] = {}
    for tensor in sorted(named.values(), key=lambda tensor: tensor.dim() <= 1):
        sorts.setdefault((decay_of(tensor), getattr(tensor, "device_mesh", None)), []).append(tensor)
    groups = [{"params": tensors, "weight_decay": decay} for (decay, _), tensors in sorts.items()]
    if cls is Muon:
        groups = muon_groups(named, decay_of)
    arguments: dict[str, object] = {"lr": settings.lr}
    if "adam" in settings.optimizer.lower() or cls is Muon:
        arguments |= {"betas": tuple(settings.betas), "eps": settings.eps}
    chosen = dict(settings.override_optimizer_config or {})
    if cls in (torch.optim.AdamW, torch.optim.Adam) and not chosen.get("foreach"):  # torch: one or the other
        arguments["fused"] = True
    arguments |= chosen
    try:
        made: Optimizer = cls(groups, **arguments)
        return made
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{settings.optimizer_impl}.{settings.optimizer} does not take the arguments "
            f"{sorted(arguments)}: {error} Change override_optimizer_config."
        ) from error


def optimizer_class(settings: OptimConfig) -> Callable[..., Optimizer]:
    """The class that optim.optimizer and optim.optimizer_impl name."""
    if settings.optimizer_impl == "torch.optim" and settings.optimizer in BUILT_IN:
        return BUILT_IN[settings.optimizer]
    found: Callable[..., Optimizer] = load_attribute(settings.optimizer_impl, settings.optimizer)
    return found


def make_schedule(optimizer: Optimizer, settings: OptimConfig, compat: Compat = None) -> LambdaLR:
    """The learning rate per trainer step, or per update where `compat` counts updates."""
    total = settings.total_training_steps
    if total < 1 and settings.lr_warmup_steps < 0 and settings.lr_warmup_steps_ratio > 0:
        raise ValueError(
            f"lr_warmup_steps_ratio={settings.lr_warmup_steps_ratio} is a share of total_training_steps, "
            f"which is not known ({total}). Set total_training_steps or lr_warmup_steps."
        )
    ratio = settings.lr_warmup_steps_ratio
    warmup = warmup_length(max(total, 0), steps=settings.lr_warmup_steps, ratio=ratio, compat=compat)
    known = {"total_steps": total} if total >= 1 else {}
    return make_scheduler(
        optimizer,
        settings.lr_scheduler_type,
        compat=compat,
        warmup_steps=warmup,
        min_ratio=settings.min_lr_ratio or 0.0,
        num_cycles=settings.num_cycles,
        stable_ratio=settings.wsd_stable_ratio,
        **known,
    )


def optimizer_state(optimizer: Optimizer, named: Mapping[str, Tensor]) -> dict[str, dict[str, object]]:
    """The optimizer state of each tensor, by name."""
    found = {}
    for name, tensor in named.items():
        if tensor in optimizer.state:
            found[name] = dict(optimizer.state[tensor])
    return found


def load_optimizer_state(
    optimizer: Optimizer, named: Mapping[str, Tensor], state: Mapping[str, Mapping[str, object]]
) -> None:
    """The reverse of `optimizer_state`; tensors are copied to the device of their parameter, moments of torch
    and Muon also to its precision, which may be another one than before. Other optimizers have their own."""
    follows = isinstance(optimizer, Muon) or type(optimizer).__module__.startswith("torch.optim")
    for name, tensor in named.items():
        if name not in state:
            optimizer.state.pop(tensor, None)
            continue
        loaded: dict[str, object] = {}
        for key, value in state[name].items():
            if isinstance(value, Tensor):
                value = value.detach().clone()
                moment = key != "step" and value.dim() >= min(1, tensor.dim())  # else one number, in float32
                if follows and moment and value.is_floating_point():
                    value = value.to(tensor.dtype)
            loaded[key] = value
        if follows and optimizer.defaults.get("amsgrad") and "max_exp_avg_sq" not in loaded:
            raise ValueError("The saved optimizer state is one of amsgrad=false. Take amsgrad out again.")
        optimizer.state[tensor] = _on_device(optimizer, loaded, tensor.device)


def move_optimizer(optimizer: Optimizer, device: torch.device | str) -> None:
    """Move the optimizer state to another device."""
    for state in optimizer.state.values():
        state.update(_on_device(optimizer, state, device))


def _on_device(
    optimizer: Optimizer, state: Mapping[str, object], device: torch.device | str
) -> dict[str, object]:
    # Unless it is fused or capturable, torch counts steps on the CPU, wherever the weights are.
    steps_move = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    moved: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and (key != "step" or steps_move):
            value = value.to(device)
        moved[key] = value
    return moved
