"""Seconds of every phase of a step: operations and bytes, divided by the rates that devices reach. The
numbers are rough; they are meant for comparing settings."""

from __future__ import annotations

from strop.planning.activations import FLOAT32, layers_kept
from strop.planning.devices import (
    ANSWER_SHARE,
    BANDWIDTH,
    DECODE_EFFICIENCY,
    DECODE_LAUNCH,
    DISK,
    HOST_LINK,
    HOST_MEMORY,
    KEPT_TRAFFIC,
    LOGIT_TRAFFIC,
    NODE_LINK,
    PREFILL_EFFICIENCY,
    PRODUCT_EFFICIENCY,
    SUM_LATENCY,
    Device,
    PlannedCluster,
)
from strop.planning.forecast import Forecast
from strop.planning.job import Pass, PlannedJob
from strop.planning.megatron import (
    MegatronModel,
    bubble,
    context_bytes,
    expert_bytes,
    stage_layers,
    tensor_bytes,
    update_bytes,
)
from strop.planning.rollout import PlannedSampler
from strop.planning.shape import Shape
from strop.planning.training import TrainedModel

FORWARD = 1
FORWARD_BACKWARD = 3
FORWARD_BACKWARD_RECOMPUTE = 4
"""The cost of a pass in forward passes: alone, with its backward pass, and with gradient checkpointing of
whole layers."""


def seconds(forecast: Forecast) -> dict[str, float]:
    """Seconds by phase, in the order of a step."""
    job = forecast.job
    found = {}
    if job.sampler is not None and not forecast.starved:
        found["rollout"] = sampling_seconds(job.sampler, job.cluster, forecast.rows)
    for one in job.passes:
        found[one.phase] = pass_seconds(one, job)
    if job.sampler is not None:
        found["sync"] = sync_seconds(job)
    return found


def save_seconds(job: PlannedJob) -> float:
    """Seconds to write a checkpoint, in the background."""
    return sum(model.checkpoint for model in job.models.values()) / (DISK * job.cluster.nodes)


def operations(shape: Shape, tokens: int, answered: int, length: int) -> float:
    """Floating-point operations of a forward pass: matrix products, the head, causal attention."""
    head = shape.embedding
    if shape.scalar:
        head = 0
    attention = 2 * shape.layers * shape.queries * length * tokens
    return 2.0 * (shape.multiplied * tokens + head * answered) + attention


def pass_seconds(one: Pass, job: PlannedJob) -> float:
    """Seconds of a pass. Responses have their mean length. Communication overlaps with computation; the
    slower one counts."""
    model = job.models[one.role]
    ranks = job.cluster.ranks
    answered = int(one.total.answered * _mean_response_share(job))
    tokens = one.total.all - one.total.answered + answered
    length = one.total.all // max(1, one.total.all // one.longest)
    forward = forward_seconds(model, job.cluster.device, tokens, answered, length)
    computing = _forward_passes(one, model) * forward / ranks
    if isinstance(model, MegatronModel):
        return one.times * _pipeline_seconds(one, model, job.cluster, tokens, computing)
    batches = max(1, round(tokens / ranks / one.tokens.all))
    communicating = batches * communication_seconds(model, job.cluster, learns=one.learns)
    stepping = 0.0
    if one.learns:
        stepping = one.updates * _host_step(model)
    return one.times * (max(computing, communicating) + stepping)


def _pipeline_seconds(
    one: Pass, model: MegatronModel, cluster: PlannedCluster, tokens: int, computing: float
) -> float:
    """Seconds of a pass with strategy=megatron. `tokens` of all ranks, `computing` seconds of each rank."""
    division = model.division
    own = tokens // (division.data * division.context)
    batches = max(1, round(own / one.tokens.all / one.updates))
    uneven = stage_layers(model.shape, division) * division.stages / model.shape.layers
    spent = computing * bubble(division, batches) * uneven
    ways = _forward_passes(one, model) - (one.learns and model.checkpointing == "none")
    tensor = tensor_bytes(model.shape, model.numbers, division, own) / link(cluster, division.tensor)
    context = context_bytes(model.shape, model.numbers, division, own)
    context /= link(cluster, division.tensor * division.context)
    experts = expert_bytes(model.shape, model.numbers, division, own)
    experts /= link(cluster, max(division.experts, division.tensor))
    spent += ways * (tensor + context + experts)
    if one.learns:
        data = division.data * division.tensor * division.context
        spent += one.updates * update_bytes(model) / link(cluster, data)
        if model.offloads_moments:
            spent += 2 * model.in_host / HOST_LINK
    if model.offloads_weights:
        spent += model.numbers.compute * model.own / HOST_LINK
    return spent


def _forward_passes(one: Pass, model: TrainedModel) -> float:
    """The cost of a pass in forward passes. Gradient checkpointing computes a part of the forward pass
    again."""
    if not one.learns:
        return FORWARD
    if model.checkpointing == "none":
        return FORWARD_BACKWARD
    if model.checkpointing == "full":
        return FORWARD_BACKWARD_RECOMPUTE
    shape = model.shape
    feed_forward = 2.0 * (shape.multiplied - shape.layers * _attention_weights(shape))
    whole = operations(shape, 1, 1, one.longest)
    return FORWARD_BACKWARD + feed_forward / whole


def _attention_weights(shape: Shape) -> int:
    """Weights of the products around attention, in one layer."""
    return shape.hidden * (2 * shape.queries + 2 * shape.keys)


def _host_step(model: TrainedModel) -> float:
    """Seconds of an optimizer step on the CPU, if the optimizer state is offloaded."""
    if not model.placement.in_host:
        return 0.0
    touched = model.numbers.master * (2 * (1 + model.moments) + 1) * model.trained
    return touched / model.placement.shards / HOST_MEMORY


def forward_seconds(model: TrainedModel, device: Device, tokens: int, answered: int, length: int) -> float:
    """Seconds of a forward pass on one device: matrix products, and operations bound by memory bandwidth."""
    shape = model.shape
    products = operations(shape, tokens, answered, length) / (device.flops * PRODUCT_EFFICIENCY)
    layers = layers_kept(shape, tokens, model.numbers)
    logits = FLOAT32 * shape.vocabulary * answered
    if shape.scalar:
        logits = 0
    return products + (KEPT_TRAFFIC * layers + LOGIT_TRAFFIC * logits) / (device.bandwidth * BANDWIDTH)


def communication_seconds(model: TrainedModel, cluster: PlannedCluster, *, learns: bool) -> float:
    """Seconds of collectives for one micro-batch: all-gather of the weights for the forward and the backward
    pass, reduce-scatter of the gradients within a copy of the weights, and all-reduce between copies."""
    place = model.placement
    if not place.sharded:
        return 0.0
    gathers = 1
    if learns and not place.keeps_gathered:
        gathers = 2
    within = gathers * model.numbers.compute * model.shape.parameters
    between = 0
    if learns:
        within += place.reduce * model.trained
        if place.shards < place.ranks:
            between = 2 * place.reduce * model.trained // place.shards
    network = within / place.tensor / link(cluster, place.shards) + between / link(cluster, place.ranks)
    return network + _through_host(model, gathers, learns=learns)


def _through_host(model: TrainedModel, gathers: int, *, learns: bool) -> float:
    """Seconds to copy offloaded weights to the device for each all-gather, and gradients back."""
    if not model.placement.in_host:
        return 0.0
    copied = gathers * (model.numbers.master * model.trained + model.numbers.compute * model.fixed)
    if learns:
        copied += model.numbers.master * model.trained
    return copied / model.placement.shards / HOST_LINK


def link(cluster: PlannedCluster, group: int) -> float:
    """Bytes per second and device within a group of ranks."""
    if group <= cluster.per_node:
        return cluster.device.link
    return NODE_LINK


def _mean_response_share(job: PlannedJob) -> float:
    """Mean length of a response as a share of its limit. Supervised rows are planned at full length."""
    if job.sampler is None:
        return 1.0
    return ANSWER_SHARE


def sampling_seconds(sampler: PlannedSampler, cluster: PlannedCluster, rows: int) -> float:
    """Seconds of a rollout. Finished sequences are replaced until the queue is empty; then the longest
    responses continue in a batch that gets smaller."""
    rows = min(rows, sampler.sequences)
    mean = sampler.response * ANSWER_SHARE
    full = sampler.sequences * mean / rows
    tail = sampler.response - mean
    device = cluster.device
    prompts = -(-sampler.sequences // sampler.samples) * sampler.prompt
    prefill = operations(sampler.shape, prompts, 0, sampler.prompt) / (device.flops * PREFILL_EFFICIENCY)
    prefill /= sampler.tensor
    decode_full = full * decode_seconds(sampler, cluster, rows)
    decode_tail = tail * decode_seconds(sampler, cluster, max(1, rows // 4))
    return prefill + decode_full + decode_tail


def decode_seconds(sampler: PlannedSampler, cluster: PlannedCluster, rows: int) -> float:
    """Seconds of a decode step with `rows` sequences: matrix products (bound by the weights that are read or
    by operations), KV cache, logits, kernel launches."""
    shape = sampler.shape
    device = cluster.device
    c = sampler.numbers.compute
    bandwidth = device.bandwidth * BANDWIDTH
    active = shape.multiplied + shape.embedding
    read = active
    if shape.experts:
        read = min(shape.parameters, active * rows)
    reading = c * read / bandwidth
    computing = 2.0 * active * rows / (device.flops * DECODE_EFFICIENCY)
    products = max(reading, computing) / sampler.tensor
    context = sampler.prompt + sampler.response * ANSWER_SHARE / 2
    cached = rows * context * sampler.per_token / bandwidth
    logits = 2 * 4 * rows * shape.vocabulary / bandwidth / sampler.tensor
    launches = 0.0
    if not device.is_cpu:
        launches = shape.layers * DECODE_LAUNCH
    all_reduces = 0.0
    if sampler.tensor > 1:
        all_reduces = 2 * shape.layers * (SUM_LATENCY + 2 * c * rows * shape.hidden / device.link)
    return products + cached + logits + launches + all_reduces


def sync_seconds(job: PlannedJob) -> float:
    """Seconds to send the weights of the actor to the engine."""
    actor = job.models["actor"]
    if not actor.placement.sharded and job.engine == "native" and not job.apart:
        return 0.0
    rate = job.cluster.device.link
    if actor.placement.sharded:
        rate = link(job.cluster, actor.placement.shards)
    return actor.numbers.compute * actor.shape.parameters / rate
