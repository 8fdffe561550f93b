"""Training on megatron-core: tensor, pipeline, expert and context parallelism.

The Hugging Face module that it is given says what the model is and brings its weights; its parameters move
to the meta device. The layers that compute are megatron-core's. All ranks get the same batch, and callers see
what they would see on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.backends.base import BackendSettings, Loss, MicroBatching, Outputs
from strop.backends.fsdp.sharded import RegionReader, fill
from strop.backends.megatron.fits import problems
from strop.backends.megatron.library import weigh_balance
from strop.backends.megatron.load import to_meta
from strop.backends.megatron.lora import StageAdapters, refuse_other_adapters
from strop.backends.megatron.names import Place, places_of
from strop.backends.megatron.options import transformer_options
from strop.backends.megatron.passes import LastStage, Recorder, run_schedule
from strop.backends.megatron.replay import routed_layers
from strop.backends.megatron.rows import MicroRow, MicroRows, lay_out_row, outputs_of
from strop.backends.megatron.schedules import megatron_schedule
from strop.backends.megatron.stage import StageChunk, build_chunks, use_routing_biases
from strop.backends.megatron.topology import Sizes, join
from strop.backends.megatron.weights import StageWeights
from strop.backends.micro_batches import OutOfMemoryInPlace, on_device, shard_rows, sum_reports
from strop.backends.optimizer import optimizer_state
from strop.backends.output_tables import empty_tables, write_rows
from strop.backends.ranked import RankedBackend, partition_rows
from strop.config.schema.megatron import MegatronConfig
from strop.models.build import persistent_buffers
from strop.models.heads import HEAD
from strop.models.layouts.routing import of_tokens
from strop.models.lora import base_model, base_name, has_adapters, is_adapter_weight
from strop.ranks import Ranks
from strop.types import Batch

Loader = Callable[[Mapping[str, Tensor], Mapping[str, torch.Size]], None]
"""(this rank's weights to fill, whole shapes of all weights), each by Hugging Face name."""
_REMEDIES = (
    "model.enable_gradient_checkpointing, megatron.optimizer_offload, or a larger "
    "megatron.tensor_model_parallel_size, context_parallel_size or pipeline_model_parallel_size"
)
"""What makes room if micro-batches cannot be smaller."""


class MegatronBackend(RankedBackend):
    """One model over the ranks of a run. Give the module with its weights, or on the meta device together
    with `load_weights`."""

    needs_ranks = True
    weights: StageWeights
    adapters: StageAdapters | None = None

    def __init__(
        self,
        module: Any,
        settings: BackendSettings | None = None,
        *,
        ranks: Ranks,
        megatron: MegatronConfig | None = None,
        load_weights: Loader | None = None,
        fp32_residual: bool = False,
    ):
        """`fp32_residual`: residual sums are in float32, whatever the layers compute in."""
        settings = settings or BackendSettings()
        super().__init__(module, settings, ranks)
        self.megatron = megatron or MegatronConfig()
        for key, problem in problems(module.config, self.megatron):
            raise ValueError(f"{key}: {problem}")
        refuse_other_adapters(module)
        self.topology = join(Sizes.of(self.megatron), ranks, self.device)
        skeleton = base_model(module)
        self.scalar = getattr(skeleton, HEAD, None) is not None
        self.shapes = {name: weight.shape for name, weight in module.named_parameters()}
        given = None
        if load_weights is None:
            given = dict(module.named_parameters())
        options = transformer_options(skeleton, self.megatron)
        options["sequence_parallel"] = self.megatron.sequence_parallel and self.topology.sizes.tensor > 1
        self.chunks = build_chunks(
            skeleton,
            self.topology,
            dtype=settings.compute,
            head_dtype=settings.master,
            device=self.device,
            scalar=self.scalar,
            wide_residual=fp32_residual and settings.compute != torch.float32,
            options=options,
        )
        trains = settings.optim is not None
        self.weights = StageWeights(
            self._places(),
            self.shapes,
            self.topology,
            master=settings.master,
            distributed=self.megatron.use_distributed_optimizer,
            frozen=[name for name, weight in module.named_parameters() if not weight.requires_grad],
        )
        self._owners = self._owning_stages()
        if load_weights is not None:
            load_weights(self.weights.masters, self.shapes)
            self.weights.publish()
        elif given is not None:
            self.weights.load({name: weight.detach() for name, weight in given.items()})
        to_meta(module)
        self.weights.forget_masters()
        if trains:
            self.weights.collect_gradients()
            self._make_optimizer()
        self._offload_between_passes(
            model=self.megatron.param_offload, optimizer=self.megatron.optimizer_offload
        )

    def _places(self) -> dict[str, Place]:
        """Where this rank has its weights, those of adapters included, by their names in the module."""
        names = {base_name(name): name for name in self.shapes}
        found: dict[str, Place] = {}
        for name, place in places_of(self.chunks, self.topology, scalar=self.scalar).items():
            found[names.get(name, name)] = place
        if has_adapters(self.module):
            self.adapters = StageAdapters(self.module, self.chunks, found)
            found |= self.adapters.places
        return found

    def _make_optimizer(self) -> None:
        super()._make_optimizer()
        if self.optimizer is not None and self.settings.optim is not None:
            self.schedule = megatron_schedule(self.optimizer, self.settings.optim, self.settings.compat)

    def _owning_stages(self) -> dict[str, int]:
        """The stage that has each weight; the first one, of two."""
        found: dict[str, int] = {}
        mine = (self.topology.pipeline_rank, list(self.weights.places))
        for stage, names in sorted(self.ranks.all_gather_object(mine)):
            for name in names:
                found.setdefault(name, stage)
        missing = sorted(self.shapes.keys() - found.keys())
        unknown = sorted(found.keys() - self.shapes.keys())
        if missing or unknown:
            raise ValueError(
                f"strategy=megatron builds other weights than this model has: {missing[:3]} are in the model "
                f"alone, {unknown[:3]} in Megatron alone. Set strategy=fsdp."
            )
        return found

    # --- passes ---------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        self._set_training(False)
        records = "experts" in want
        sizes = routed_layers(self.module.config) if records else None
        tables = empty_tables(batch, want, None, sizes)
        parts = self._share(batch, micro)

        def answer(chunk: StageChunk, hidden: Tensor, row: MicroRow) -> Tensor:
            if row.number is None:
                return hidden
            for name, found in self._of_last_stage(chunk, hidden, row).items():
                write_rows(tables, name, parts[row.number], found)
            return hidden

        def record(chunk: StageChunk, row: MicroRow) -> None:
            for number, chosen in chunk.experts.noted(row.tokens):
                if row.number is not None:
                    found = of_tokens(chosen, row.inputs)
                    tables["experts"][parts[row.number], : found.shape[1], number] = found.int()

        if records:
            for chunk in self.chunks:
                chunk.experts.record()
        with torch.no_grad():
            self._run(self._rows(batch, want, parts), answer, learn=False, record=record if records else None)
        for name, table in tables.items():  # rows of other ranks are 0 here, and layers of other stages
            reports = self._reports
            if name == "experts":
                reports = self.topology.tensor_rank == 0 and self.topology.context_rank == 0
            dist.all_reduce(table if reports else table.zero_())
        return Outputs(**tables)

    def _forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
        self._set_training(True)
        parts = self._share(batch, micro)
        losses: list[Tensor] = []
        reports: list[dict[str, Tensor]] = []

        def learn(chunk: StageChunk, hidden: Tensor, row: MicroRow) -> Tensor:
            if row.number is None:
                return 0.0 * hidden.float().sum()
            outputs = Outputs(**self._of_last_stage(chunk, hidden, row))
            value, sums = loss(outputs, on_device(row.piece, self.device))
            losses.append(value.detach().clone())
            reports.append({name: number.detach() for name, number in sums.items()})
            return value if self.scaling is None else value * self.scaling.value

        rows = self._rows(batch, want, parts)
        if self._balances:
            self._weigh_balance(rows)
        with self._saved_activations():
            self._run(rows, learn, learn=True)
        self._refuse_losses(batch, want, parts, losses)
        self.weights.reduce_gradients()
        return self.ranks.all_reduce_sum(sum_reports(reports) if self._reports else {})

    def _run(
        self, rows: MicroRows, finish: LastStage, *, learn: bool, record: Recorder | None = None
    ) -> None:
        self.topology.activate()
        try:
            run_schedule(self.chunks, rows, finish, learn=learn, record=record)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryInPlace(self.topology.place, rows.largest, _REMEDIES) from error
        finally:
            for chunk in self.chunks:
                chunk.experts.forget()

    @property
    def _balances(self) -> bool:
        """Whether routers add losses of their own."""
        options = self.chunks[0].gpt.config
        return bool(options.num_moe_experts and (options.moe_aux_loss_coeff or options.moe_z_loss_coeff))

    def _weigh_balance(self, rows: MicroRows) -> None:
        """A load-balancing loss is the mean over the tokens of the batch, whatever the micro-batches. Rows
        that are computed because other ranks wait count too."""
        sizes = self.topology.sizes
        tokens = sum(row.tokens for row in rows) if self._reports else 0
        total = self.ranks.all_reduce_sum({"tokens": float(tokens)})["tokens"]
        scale = 1.0 if self.scaling is None else self.scaling.value
        # A router multiplies by the tokens of its own rank, which are a share of those of the row.
        weigh_balance(scale * sizes.tensor * sizes.context / max(total, 1.0))

    def _of_last_stage(self, chunk: StageChunk, hidden: Tensor, row: MicroRow) -> dict[str, Tensor]:
        return outputs_of(chunk, hidden, row, self.topology, self.temperature)

    @property
    def _reports(self) -> bool:
        return self.topology.reports

    def _share(self, batch: Batch, micro: MicroBatching) -> list[list[int]]:
        """The micro-batches of this rank."""
        topology = self.topology
        if micro.max_tokens is not None:  # each rank has its slice of the tokens
            micro = dataclasses.replace(micro, max_tokens=micro.max_tokens * topology.sizes.context)
        shares = shard_rows(batch.lengths, topology.data, rows_per_item=micro.rows_per_item)
        rows = shares[topology.data_rank]
        return self.ranks.run_or_raise_on_all(
            lambda: partition_rows(batch, rows, micro), "cutting the batch into micro-batches"
        )

    def _rows(self, batch: Batch, want: Sequence[str], parts: list[list[int]]) -> MicroRows:
        """The packed rows of micro-batches. Idle rows follow where ranks exchange tokens for their experts,
        and where a schedule of virtual stages needs a multiple of the number of stages."""
        sizes = self.topology.sizes
        count = len(parts)
        if sizes.expert > 1:
            count = max(self.ranks.all_gather_object(count))
        if sizes.virtual > 1:
            count = -(-count // sizes.pipeline) * sizes.pipeline

        def lay_out(part: list[int], number: int | None) -> MicroRow:
            return lay_out_row(batch.select(part), want, self.device, self.topology, number)

        makers = [partial(lay_out, part, number) for number, part in enumerate(parts)]
        if count > len(parts):
            shortest = min(range(len(batch)), key=batch.lengths.__getitem__)
            makers += [partial(lay_out, [shortest], None)] * (count - len(parts))
        return MicroRows(makers)

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.gpt.train(training)

    # --- weights --------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face name, LoRA merged, one at a time: every rank must go through all of
        them."""
        group = self.topology.pipeline_group
        for name in self.shapes:
            if is_adapter_weight(name):
                continue
            owner = self._owners[name]
            found: Tensor | None = None
            if owner == self.topology.pipeline_rank:
                found = self.weights.whole(name, self._added(name))
            if group.size() > 1:
                if found is None:
                    found = torch.empty(self.shapes[name], dtype=self._dtype_of(name), device=self.device)
                dist.broadcast(found, group=group, group_src=owner)
            assert found is not None
            yield base_name(name), found

    def _added(self, name: str) -> Tensor | None:
        """What an adapter adds to this rank's share of a weight."""
        adapter = None if self.adapters is None else self.adapters.by_weight.get(name)
        return None if adapter is None else adapter.product()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside it LoRA adapters are off: the model before training."""
        with super().reference():
            assert self.adapters is not None
            self.adapters.switch.on = False
            try:
                yield
            finally:
                self.adapters.switch.on = True

    def _dtype_of(self, name: str) -> torch.dtype:
        if base_name(name).startswith(f"{HEAD}."):
            return self.settings.master
        return self.settings.compute

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and schedule; with adapters, only what is trained. Weights of other stages are
        empty DTensors over their ranks."""
        held = self.weights.held()
        model: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if self.adapters is not None and not parameter.requires_grad:
                continue
            owner = self._owners[name]
            if owner == self.topology.pipeline_rank:
                model[name] = held[name]
            else:
                dtype = self.settings.master if parameter.requires_grad else self._dtype_of(name)
                model[name] = self.weights.elsewhere(name, owner, dtype)
        if self.adapters is None:
            model |= persistent_buffers(self.module)
        state: dict[str, Any] = {"model": model}
        if self.optimizer is not None and self.schedule is not None:
            state["optimizer"] = self._whole_optimizer_state()
            state["schedule"] = {"step": self.schedule.last_epoch}
            if self.scaling is not None:
                state["loss_scale"] = self.scaling.state()
        return state

    def _whole_optimizer_state(self) -> dict[str, dict[str, object]]:
        """Of all stages: every rank knows which tensors there are, rank 0 writes the list."""
        assert self.optimizer is not None
        mine = optimizer_state(self.optimizer, self.weights.masters)
        if self.topology.sizes.pipeline == 1:
            return mine
        described: dict[str, dict[str, object]] = {}
        for name, values in mine.items():
            if self._owners[name] == self.topology.pipeline_rank:
                described[name] = {key: _described(value, self.shapes[name]) for key, value in values.items()}
        everything: dict[str, dict[str, object]] = {}
        for part in self.ranks.all_gather_object(described):
            everything |= part
        found: dict[str, dict[str, object]] = {}
        for name in self.shapes:
            if name not in everything:
                continue
            owner = self._owners[name]
            if owner == self.topology.pipeline_rank:
                found[name] = mine[name]
                continue
            values = {}
            for key, value in everything[name].items():
                values[key] = value
                if isinstance(value, torch.dtype):
                    values[key] = self.weights.elsewhere(name, owner, value)
            found[name] = values
        return found

    def _fill_weights(self, given: Mapping[str, Tensor | RegionReader]) -> None:
        self.weights.load({name: given[name] for name in self.weights.masters})
        if self.adapters is not None:
            return
        for name, buffer in persistent_buffers(self.module).items():
            fill(buffer, given[name])
        for chunk in self.chunks:
            use_routing_biases(chunk.gpt, self.module, self.device)

    def _move(self, device: torch.device, model: bool, optimizer: bool) -> None:
        if model:
            for chunk in self.chunks:
                chunk.gpt.to(device)
        super()._move(device, False, optimizer)


def _described(value: object, shape: torch.Size) -> object:
    """A value of the optimizer state for other stages: the dtype of a tensor of the weight's shape."""
    if isinstance(value, Tensor) and value.shape == shape:
        return value.dtype
    return value
