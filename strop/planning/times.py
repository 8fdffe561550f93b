"""Seconds of every phase of a step: operations and bytes over what devices reach. Rough, and good for comparing settings."""

from __future__ import annotations

from strop.planning.activations import FLOAT32, layers_kept
from strop.planning.assumptions import (
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
)
from strop.planning.devices import Cluster, Device
from strop.planning.forecast import Forecast
from strop.planning.job import Job, Pass
from strop.planning.rollout import Sampler
from strop.planning.shape import Shape
from strop.planning.training import TrainedModel

FORWARD, LEARN, LEARN_AGAIN = 1, 3, 4
"""Passes forward that a pass is worth: alone, with its backward pass, and with recomputation."""


def seconds(forecast: Forecast) -> dict[str, float]:
    """By phase, in the order of a step."""
    job, found = forecast.job, {}
    if job.sampler is not None and not forecast.starved:
        found["rollout"] = sampling_seconds(job.sampler, job.cluster, forecast.rows)
    for one in job.passes:
        found[one.phase] = pass_seconds(one, job)
    if job.sampler is not None:
        found["sync"] = sync_seconds(job)
    return found


def save_seconds(job: Job) -> float:
    """To write a checkpoint, in the background."""
    return sum(model.checkpoint for model in job.models.values()) / (DISK * job.cluster.nodes)


def operations(shape: Shape, tokens: int, answered: int, length: int) -> float:
    """Of a pass forward: matrix products, the head, causal attention."""
    head = 0 if shape.scalar else shape.embedding
    attention = 2 * shape.layers * shape.queries * length * tokens
    return 2.0 * (shape.multiplied * tokens + head * answered) + attention


def pass_seconds(one: Pass, job: Job) -> float:
    """Answers have their mean length; exchanges run beside the computation, and bound it where they are slower."""
    model = job.models[one.role]
    worth = (LEARN_AGAIN if model.checkpointed else LEARN) if one.learns else FORWARD
    answered = int(one.total.answered * _share(job))
    tokens = one.total.all - one.total.answered + answered
    length = one.total.all // max(1, one.total.all // one.longest)
    computing = worth * forward_seconds(model, job.cluster.device, tokens, answered, length) / job.cluster.ranks
    batches = max(1, round(tokens / job.cluster.ranks / one.tokens.all))
    exchanging = batches * exchange_seconds(model, job.cluster, learns=one.learns)
    stepping = one.updates * _host_step(model) if one.learns else 0.0
    return one.times * (max(computing, exchanging) + stepping)


def _host_step(model: TrainedModel) -> float:
    """The optimizer's step by the processor, where its state rests in host memory."""
    if not model.placement.in_host:
        return 0.0
    touched = model.numbers.master * (2 * (1 + model.moments) + 1) * model.trained
    return touched / model.placement.shards / HOST_MEMORY


def forward_seconds(model: TrainedModel, device: Device, tokens: int, answered: int, length: int) -> float:
    """A pass forward by one device: matrix products, and everything that only moves numbers."""
    shape = model.shape
    products = operations(shape, tokens, answered, length) / (device.flops * PRODUCT_EFFICIENCY)
    layers = layers_kept(shape, tokens, model.numbers, checkpointed=False)
    logits = 0 if shape.scalar else FLOAT32 * shape.vocabulary * answered
    return products + (KEPT_TRAFFIC * layers + LOGIT_TRAFFIC * logits) / (device.bandwidth * BANDWIDTH)


def exchange_seconds(model: TrainedModel, cluster: Cluster, *, learns: bool) -> float:
    """Gathering all weights of a micro-batch once forward and once backward, and adding up its gradients, within a copy of the
    weights and then between copies."""
    place = model.placement
    if not place.sharded:
        return 0.0
    passes = 2 if learns and not place.keeps_gathered else 1
    moved = passes * model.numbers.compute * model.shape.parameters
    moved += place.reduce * model.trained if learns else 0
    between = 2 * place.reduce * model.trained // place.shards if learns and place.shards < place.ranks else 0
    exchanged = moved / place.tensor / link(cluster, place.shards) + between / link(cluster, place.ranks)
    return exchanged + _through_host(model, passes, learns=learns)


def _through_host(model: TrainedModel, passes: int, *, learns: bool) -> float:
    """Pieces that rest in host memory come over for each gathering, and their gradients go back."""
    if not model.placement.in_host:
        return 0.0
    brought = passes * (model.numbers.master * model.trained + model.numbers.compute * model.fixed)
    back = model.numbers.master * model.trained if learns else 0
    return (brought + back) / model.placement.shards / HOST_LINK


def link(cluster: Cluster, group: int) -> float:
    """Bytes per second and device within a group of ranks."""
    return cluster.device.link if group <= cluster.per_node else NODE_LINK


def _share(job: Job) -> float:
    return ANSWER_SHARE if job.sampler is not None else 1.0


def sampling_seconds(sampler: Sampler, cluster: Cluster, rows: int) -> float:
    """Rows are refilled until the queue is empty; then the longest answers run on in an ever emptier batch."""
    rows = min(rows, sampler.sequences)
    mean = sampler.response * ANSWER_SHARE
    full = sampler.sequences * mean / rows
    tail = sampler.response - mean
    device = cluster.device
    prompts = -(-sampler.sequences // sampler.samples) * sampler.prompt
    prefill = operations(sampler.shape, prompts, 0, sampler.prompt) / (device.flops * PREFILL_EFFICIENCY) / sampler.tensor
    return prefill + full * decode_seconds(sampler, cluster, rows) + tail * decode_seconds(sampler, cluster, max(1, rows // 4))


def decode_seconds(sampler: Sampler, cluster: Cluster, rows: int) -> float:
    """One token for each of `rows`: matrix products (by weights read or by operations), cache, logits, launches."""
    shape, device, c = sampler.shape, cluster.device, sampler.numbers.compute
    bandwidth = device.bandwidth * BANDWIDTH
    met = shape.multiplied + shape.embedding
    read = min(shape.parameters, met * rows) if shape.experts else met
    products = max(c * read / bandwidth, 2.0 * met * rows / (device.flops * DECODE_EFFICIENCY)) / sampler.tensor
    context = sampler.prompt + sampler.response * ANSWER_SHARE / 2
    cached = rows * context * sampler.per_token / bandwidth
    logits = 2 * 4 * rows * shape.vocabulary / bandwidth / sampler.tensor
    launches = 0.0 if device.is_cpu else shape.layers * DECODE_LAUNCH
    sums = 0.0 if sampler.tensor == 1 else 2 * shape.layers * (SUM_LATENCY + 2 * c * rows * shape.hidden / device.link)
    return products + cached + logits + launches + sums


def sync_seconds(job: Job) -> float:
    actor = job.models["actor"]
    if not actor.placement.sharded and job.engine == "native" and not job.apart:
        return 0.0
    size = actor.numbers.compute * actor.shape.parameters
    return size / (link(job.cluster, actor.placement.shards) if actor.placement.sharded else job.cluster.device.link)
