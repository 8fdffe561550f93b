"""The binary encoding: against the library of protocol buffers, and with bytes that are no message."""

from __future__ import annotations

import numpy as np
import pytest

from strop.rewards.server_requests import RequestRefused
from strop.serve.messages import (
    MAX_VALUES,
    SampledSequence,
    read_training_pass,
    sample_output,
    training_output,
)
from strop.serve.wire import Message, WireError, Writer
from tests.serve.scene import pass_body


def test_numbers_and_texts_come_back() -> None:
    data = Writer().integer(1, -5).integer(2, 2**40).double(3, -0.1).text(4, "é").integer(9, 7).integer(9, 8)
    message = Message(data.done())
    assert (message.integer(1), message.integer(2), message.double(3)) == (-5, 2**40, -0.1)
    assert (message.text(4), message.integers(9), message.integer(17), message.text(18)) == (
        "é",
        [7, 8],
        0,
        "",
    )


def test_the_encoding_is_that_of_protocol_buffers() -> None:
    struct_pb2 = pytest.importorskip("google.protobuf.struct_pb2")
    value = struct_pb2.Value(struct_value=struct_pb2.Struct())
    value.struct_value.fields["a"].number_value = 1.5
    value.struct_value.fields["b"].string_value = "x" * 300
    found = dict(Message(value.SerializeToString()).message(5).entries(1))
    assert found["a"].message(2).double(2) == 1.5
    assert found["b"].message(2).text(3) == "x" * 300
    inner = Writer().message(1, Writer().text(1, "a").message(2, Writer().double(2, 1.5)))
    read = struct_pb2.Value.FromString(Writer().message(5, inner).done())
    assert read.struct_value.fields["a"].number_value == 1.5


@pytest.mark.parametrize(
    "data",
    [b"\x08", b"\x0a\x05ab", b"\x09\x00", b"\x03", b"\x00\x01", b"\x08" + b"\xff" * 11, b"\xff" * 20],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        Message(data)
    with pytest.raises(RequestRefused, match="not a ForwardBackwardRequest"):
        read_training_pass(data)


def test_every_cut_of_a_request_is_refused_or_read() -> None:
    body = pass_body("m", 1)
    for end in range(len(body)):
        try:
            read_training_pass(body[:end])
        except RequestRefused as refusal:
            assert refusal.status == 400


def test_a_training_pass_is_read() -> None:
    body = pass_body("m", 3, "ppo", settings={"clip_low_threshold": 0.9}, weights=[0.0, 0.5, 1.0])
    wanted = read_training_pass(body)
    assert (wanted.model_id, wanted.seq_id, wanted.loss, wanted.forward_only) == ("m", 3, "ppo", False)
    assert wanted.settings == {"clip_low_threshold": 0.9}
    (datum,) = wanted.data
    assert datum.tokens.tolist() == [1, 2, 3] and datum.targets.tolist() == [2, 3, 4]
    assert datum.inputs["weights"].tolist() == [0.0, 0.5, 1.0]


def test_sparse_targets_become_dense() -> None:
    sparse = Writer().raw(1, np.array([5, 6], "<i8").tobytes())
    sparse.raw(2, np.array([0, 1, 2], "<i8").tobytes()).raw(3, np.array([1, 0], "<i8").tobytes())
    target = Writer().message(2, sparse).integer(3, 2).integer(4, 2).integer(4, 2)
    tokens = Writer().message(1, Writer().raw(1, np.array([1, 2], "<i4").tobytes()))
    datum = Writer().message(1, tokens).message(2, Writer().text(1, "target_tokens").message(2, target))
    (read,) = read_training_pass(Writer().message(3, datum).done()).data
    assert read.targets.tolist() == [[0, 5], [6, 0]]


def sparse_datum(columns: int) -> Writer:
    """One token with so many targets, all of which are 0."""
    sparse = Writer().raw(2, np.array([0, 0], "<i8").tobytes())
    target = Writer().message(2, sparse).integer(3, 2).integer(4, 1).integer(4, columns)
    tokens = Writer().message(1, Writer().raw(1, np.array([1], "<i4").tobytes()))
    return Writer().message(1, tokens).message(2, Writer().text(1, "target_tokens").message(2, target))


@pytest.mark.parametrize(
    ("columns", "data", "status", "words"),
    [
        (MAX_VALUES + 1, 1, 413, "more than"),
        (MAX_VALUES // 4, 5, 413, "more than"),
        (2**62, 1, 413, "more than"),
        (-3, 1, 400, "not a sparse matrix"),
    ],
)
def test_a_small_request_does_not_become_large_tensors(
    columns: int, data: int, status: int, words: str
) -> None:
    request = Writer()
    for _ in range(data):
        request.message(3, sparse_datum(columns))
    with pytest.raises(RequestRefused, match=words) as refusal:
        read_training_pass(request.done())
    assert refusal.value.status == status


def test_answers_are_messages() -> None:
    output = Message(
        training_output({"logprobs": [np.array([-1.0, -2.0]), np.array([-3.0])]}, {"a:sum": 2.0})
    )
    (record,) = output.messages(2)
    ((name, entry),) = record.entries(2)
    assert name == "logprobs" and record.integer(3) == 2
    assert np.frombuffer(entry.message(2).raw(2), "<i8").tolist() == [0, 8, 12]
    sample = Message(sample_output([SampledSequence([1, 2], [-0.5, -1.5], "length")], [float("nan"), -1.0]))
    (sequence,) = sample.messages(1)
    assert sequence.integer(1) == 1 and np.frombuffer(sequence.raw(2), "<i4").tolist() == [1, 2]
