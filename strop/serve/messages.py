"""The messages of the protocol that travel as protocol buffers: training data in, tensors and samples out.

ForwardBackwardRequest   data of a training pass; every other request is JSON
ForwardBackwardOutput    log-probs per datum and metrics
SampleResponse           sampled tokens with log-probs, and log-probs of the prompt
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strop.rewards.server_requests import RequestRefused
from strop.serve.wire import Message, WireError, Writer

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
_NUMPY_OF_DTYPE: dict[int, np.dtype[np.generic]] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
}
STOP_REASONS = {"stop": 0, "length": 1}
MAX_VALUES = 1 << 25
"""Of all tensors of a training pass. A sparse tensor of a few bytes stands for any number of values."""


@dataclass(frozen=True)
class LossDatum:
    """One sequence of a training pass: the tokens that the model reads, and tensors for the loss."""

    tokens: np.ndarray
    """int64 [T]."""
    inputs: Mapping[str, np.ndarray]
    """Name -> [T] or [T, K]: target_tokens and what the loss needs besides (weights, logprobs ...)."""

    @property
    def targets(self) -> np.ndarray:
        return self.inputs["target_tokens"]


@dataclass(frozen=True)
class TrainingPass:
    """A forward or forward_backward request."""

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float | str]
    """Hyperparameters of the loss."""
    data: Sequence[LossDatum]
    forward_only: bool

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


def read_training_pass(body: bytes) -> TrainingPass:
    """Decode a ForwardBackwardRequest; RequestRefused (400) says what is wrong with it."""
    try:
        message = Message(body)
        settings: dict[str, float | str] = {}
        for key, entry in message.entries(5):
            settings[key] = entry.double(2)
        for key, entry in message.entries(7):  # the newer form, which also has texts
            value = entry.message(2)
            settings[key] = value.text(2) if value.has(2) else value.double(1)
        data: list[LossDatum] = []
        num_values = 0
        for index, datum in enumerate(message.messages(3)):
            data.append(_datum(index, datum))
            num_values += sum(values.size for values in data[-1].inputs.values())
            _check_size(num_values)
        return TrainingPass(
            model_id=message.text(1),
            seq_id=message.integer(2),
            loss=message.text(4),
            settings=settings,
            data=data,
            forward_only=bool(message.integer(6)),
        )
    except WireError as error:
        raise RequestRefused(400, f"The body is not a ForwardBackwardRequest: {error}.") from error


def _datum(index: int, message: Message) -> LossDatum:
    pieces = []
    for chunk in message.messages(1):
        if not chunk.has(1):
            kind = "an image" if chunk.has(2) else "audio"
            raise RequestRefused(400, f"data[{index}] holds {kind}; this service trains on text only.")
        pieces.append(_array(chunk.message(1).raw(1), _NUMPY_OF_DTYPE[INT32], f"data[{index}] tokens"))
    if not pieces:
        raise RequestRefused(400, f"data[{index}] has no tokens.")
    inputs = {name: _tensor(entry.message(2), f"data[{index}] {name}") for name, entry in message.entries(2)}
    return LossDatum(np.concatenate(pieces).astype(np.int64), inputs)


def _array(data: memoryview, dtype: np.dtype[np.generic], name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestRefused(400, f"{name}: {len(data)} bytes are no array of {dtype.name}.")
    return np.frombuffer(data, dtype=dtype)


def _tensor(message: Message, name: str) -> np.ndarray:
    """A tensor as numpy array of its declared shape; a sparse one becomes dense."""
    dtype = _NUMPY_OF_DTYPE.get(message.integer(3))
    if dtype is None:
        raise RequestRefused(400, f"{name} has the unknown dtype {message.integer(3)}.")
    shape = message.integers(4)
    if not message.has(2):
        values = _array(message.raw(1), dtype, name)
        return _reshaped(values, shape or [len(values)], name)
    sparse = message.message(2)
    values = _array(sparse.raw(1), dtype, name)
    rows = _array(sparse.raw(2), np.dtype("<i8"), name).tolist()
    columns = _array(sparse.raw(3), np.dtype("<i8"), name)
    well_formed = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    ordered = rows == sorted(rows) and rows[:1] == [0] and rows[-1:] == [len(values)]
    if not well_formed or not ordered or shape[1] < 0:
        raise RequestRefused(400, f"{name} is not a sparse matrix in CSR form.")
    _check_size(math.prod(shape))
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise RequestRefused(400, f"{name} has a column outside its shape {shape}.")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _check_size(num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise RequestRefused(
            413, f"The tensors of the request have more than {MAX_VALUES} values. Send fewer data at a time."
        )


def _reshaped(values: np.ndarray, shape: list[int], name: str) -> np.ndarray:
    if min(shape, default=0) < 0 or math.prod(shape) != len(values):
        raise RequestRefused(400, f"{name} has {len(values)} values, which do not fill the shape {shape}.")
    return values.reshape(shape)


# --- answers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampledSequence:
    """One sampled sequence."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    stop_reason: str
    """stop | length."""


def training_output(outputs: Mapping[str, Sequence[np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Encode a ForwardBackwardOutput: per field, one float32 array [T, ...] of each datum."""
    record = Writer().text(1, "LossOutput")
    num_datums = 0
    for name, arrays in outputs.items():
        num_datums = len(arrays)
        record.message(2, Writer().text(1, name).message(2, _batched(arrays)))
    record.integer(3, num_datums)
    return Writer().text(1, "ArrayRecord").message(2, record).map_of_doubles(3, metrics).done()


def _batched(arrays: Sequence[np.ndarray]) -> Writer:
    flat = [np.ascontiguousarray(array, dtype="<f4") for array in arrays]
    offsets = np.cumsum([0, *(array.nbytes for array in flat)]).astype("<i8")
    data = b"".join(array.tobytes() for array in flat)
    tensor = Writer().raw(1, data).raw(2, offsets.tobytes()).integer(3, FLOAT32)
    for size in flat[0].shape[1:]:
        tensor.integer(4, size)
    return tensor


def sample_output(samples: Sequence[SampledSequence], prompt_log_probs: Sequence[float] | None) -> bytes:
    """Encode a SampleResponse. A prompt log-prob that does not exist is NaN."""
    response = Writer()
    for sample in samples:
        sequence = Writer().integer(1, STOP_REASONS[sample.stop_reason])
        sequence.raw(2, np.asarray(sample.tokens, "<i4").tobytes())
        sequence.raw(3, np.asarray(sample.log_probs, "<f4").tobytes())
        response.message(1, sequence)
    if prompt_log_probs is not None:
        response.raw(2, np.asarray(prompt_log_probs, "<f4").tobytes())
    return response.done()
