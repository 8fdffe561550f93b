"""Activations in host memory: what is copied, when, and how long copies live. tests/backends/test_cuda.py runs
it on a GPU."""

from __future__ import annotations

import functools
import itertools
import logging

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from strop.backends.activation_offload import (
    ActivationOffload,
    LeavingTensors,
    Waiting,
    saved_activations,
)


class RecordedCopier:
    """Copies at once, and writes down what it copied."""

    def __init__(self):
        self.log = []

    def to_host(self, tensor):
        self.log.append(("to host", tuple(tensor.shape)))
        return tensor.clone()

    def to_device(self, host):
        self.log.append(("to device", tuple(host.shape)))
        return host.clone(), None


def chain(sizes):
    """Products of which each keeps its input: [8, size] for each size."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(a, b)) for a, b in itertools.pairwise(sizes)]
    state = torch.randn(8, sizes[0], requires_grad=True)
    return state, weights


def gradients(offload=None, sizes=(16, 17, 18, 19, 20)):
    state, weights = chain(sizes)
    hooks = offload.hooks() if offload else torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks:
        out = state
        for weight in weights:
            out = (out @ weight).sin()
        loss = out.sum()
    del out
    loss.backward()
    return [state.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("prefetch", [0, 1200, 1 << 20])
def test_gradients_are_the_same_and_nothing_is_left(prefetch):
    copier = RecordedCopier()
    offload = ActivationOffload(copier, small=16, prefetch_bytes=prefetch)
    for one, other in zip(gradients(offload), gradients(), strict=True):
        assert torch.equal(one, other)
    kinds = [kind for kind, _ in copier.log]
    assert kinds.count("to host") == kinds.count("to device") == 8
    assert offload._waiting == [None] * 8, "no copy is kept after its last use"


def test_the_next_tensor_is_on_its_way_when_one_is_asked_for():
    copier = RecordedCopier()
    offload = ActivationOffload(copier, small=16, prefetch_bytes=8 * 20 * 4)
    gradients(offload)
    back = [shape for kind, shape in copier.log if kind == "to device"]
    there = [shape for kind, shape in copier.log if kind == "to host"]
    assert back == there[::-1], "in the reverse order"
    first = next(place for place, (kind, _) in enumerate(copier.log) if kind == "to device")
    assert copier.log[first + 1][0] == "to device"


def test_a_tensor_that_two_operations_keep_is_copied_once():
    copier = RecordedCopier()
    offload = ActivationOffload(copier, small=16)
    state = torch.randn(8, 16, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(2)]
    with offload.hooks():
        hidden = state.exp()
        loss = (hidden @ weights[0]).sum() + (hidden @ weights[1]).sum()
    loss.backward()
    assert [kind for kind, _ in copier.log].count("to host") == 1
    expected = state.detach().exp().t() @ torch.ones(8, 16)
    assert torch.equal(weights[0].grad, expected) and torch.equal(weights[1].grad, expected)


def test_a_tensor_leaves_the_device_after_a_wait_for_its_copy():
    """However far the host is ahead, the device holds so many bytes of them, or the newest alone."""
    waited = []
    leaving = LeavingTensors(2000)
    alive = []
    for place, size in enumerate((100, 200, 300, 900, 100)):
        tensor = torch.zeros(size)
        alive.append(StorageWeakRef(tensor.untyped_storage()))
        leaving.add(tensor, functools.partial(waited.append, place))
        del tensor
        held = [i for i, storage in enumerate(alive) if not storage.expired()]
        assert held == [[0], [0, 1], [1, 2], [3], [4]][place], "4 bytes a number"
        assert waited == list(range(held[0])), "no memory is free before a wait"
    leaving.clear()
    assert waited == [0, 1, 2, 3, 4] and alive[-1].expired()


def test_copies_of_a_failed_pass_are_waited_for():
    class Ready:
        waits = 0

        def wait(self):
            self.waits += 1

    used, unused = Ready(), Ready()
    host = torch.zeros(4)
    offload = ActivationOffload(RecordedCopier())
    asked = Waiting(0, host, device=host.clone(), ready=used)
    offload._waiting = [asked]
    offload.unpack(asked)
    left = Waiting(1, host, device=host.clone(), ready=unused)
    del asked, left
    assert (used.waits, unused.waits) == (1, 1), "once where it was asked for"


def test_weights_and_small_tensors_stay():
    copier = RecordedCopier()
    gradients(ActivationOffload(copier, small=8 * 18))
    assert {shape for _, shape in copier.log} == {(8, 18), (8, 19), (8, 20)}


def test_on_a_cpu_a_line_says_that_nothing_happens(caplog):
    with caplog.at_level(logging.WARNING), saved_activations(torch.device("cpu")):
        assert "enable_activation_offload has no effect on cpu" in caplog.text
