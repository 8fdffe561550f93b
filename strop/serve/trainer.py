"""The models of users, and how their requests are carried out: in order, once, and again after a crash.

A model is resident while its adapter is on the device. One that is not is restored from its newest snapshot
and the requests after it, which gives the same weights to the bit.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from dataclasses import dataclass

from strop.rewards.server_requests import RequestRefused
from strop.run.atomic_files import to_json
from strop.serve.host import AdapterHost
from strop.serve.losses import check_datum, find_loss, loss_settings
from strop.serve.messages import read_training_pass, training_output
from strop.serve.requests import CheckpointPath, Fields, read_adam
from strop.serve.store import ModelRecord, SamplerRecord, StateStore, Stored

log = logging.getLogger(__name__)

FORWARD_BACKWARD, FORWARD, OPTIM_STEP, LOAD = "forward_backward", "forward", "optim_step", "load_weights"
SAVE, SAVE_SAMPLER, CREATE, UNLOAD = (
    "save_weights",
    "save_weights_for_sampler",
    "create_model",
    "unload_model",
)
CHANGES_WEIGHTS = (FORWARD_BACKWARD, OPTIM_STEP, LOAD)
"""Requests that are computed again when a model is restored; the others left files or nothing."""
JSON, PROTO, ERROR = "json", "proto", "error"
ANSWERS_KEPT = 256
"""Per model; a client reads an answer at once, or a little later if its connection broke."""
EPHEMERAL = "ephemeral-"
"""Sampler weights that a client did not name; their number per model is limited."""


@dataclass
class Resident:
    """A model whose adapter is on the device."""

    steps: int = 0
    """Optimizer steps since the newest snapshot."""
    loaded: bool = False
    """Other weights were loaded since the newest snapshot."""


@dataclass(frozen=True)
class TrainerLimits:
    """Values of the configuration."""

    resident: int
    """Adapters on the device."""
    snapshot_steps: int
    """Optimizer steps between two snapshots of a model."""
    ephemeral_samplers: int
    """Unnamed sampler weights that are kept per model."""
    published: int
    """Samplers whose weights are ready to sample from."""


class ModelTrainer:
    """Carries out the requests of all models, one at a time."""

    def __init__(self, host: AdapterHost, store: StateStore, limits: TrainerLimits) -> None:
        self.host = host
        self.store = store
        self.limits = limits
        self._resident: OrderedDict[str, Resident] = OrderedDict()
        """The one that was not used for the longest time comes first."""
        self._published: OrderedDict[str, None] = OrderedDict()

    # --- one request ----------------------------------------------------------------------------------------

    def answer(self, model: ModelRecord, seq: int, request: Stored) -> Stored:
        """Carry out a request and store its answer. An error is an answer too."""
        try:
            found = self._carry_out(model, seq, request)
        except (RequestRefused, ValueError) as error:
            found = error_answer(str(error), "user")
            self._forget_partial_work(model, request)
        except Exception as error:
            log.exception("Request %d of %s failed", seq, model.model_id)
            found = error_answer(f"{type(error).__name__}: {error}", "server")
            self._forget_partial_work(model, request)
        self.store.write_answer(model.model_id, seq, found)
        if request.kind in (OPTIM_STEP, LOAD):  # no gradients, which a snapshot lacks
            self._snapshot_if_due(model, seq)
        return found

    def _forget_partial_work(self, model: ModelRecord, request: Stored) -> None:
        """A request that failed may have left gradients: the model is restored before its next one."""
        if request.kind in CHANGES_WEIGHTS:
            self.release(model.model_id)

    def _carry_out(self, model: ModelRecord, seq: int, request: Stored) -> Stored:
        if request.kind == UNLOAD:
            self.release(model.model_id)
            return _json({"model_id": model.model_id, "type": UNLOAD})
        resident = self._restored(model, seq)
        if request.kind == CREATE:
            return _json({"model_id": model.model_id, "type": CREATE})
        if request.kind in (FORWARD_BACKWARD, FORWARD):
            return self._pass(model, request)
        if request.kind == OPTIM_STEP:
            metrics = self._step(model, request)
            resident.steps += 1
            return _json({"metrics": metrics})
        if request.kind == LOAD:
            path = self._load(model, request)
            resident.loaded = True
            return _json({"path": path, "model_id": model.model_id, "type": LOAD})
        if request.kind == SAVE:
            return self._save(model, request)
        if request.kind == SAVE_SAMPLER:
            return self._save_sampler(model, seq, request)
        raise ValueError(f"There is no request {request.kind!r}.")

    def _pass(self, model: ModelRecord, request: Stored) -> Stored:
        wanted = read_training_pass(request.body)
        loss = find_loss(wanted.loss)
        settings = loss_settings(loss, wanted.settings)
        facts = self.host.facts
        for index, datum in enumerate(wanted.data):
            check_datum(index, datum, loss, facts.vocabulary, facts.context)
        result = self.host.training_pass(
            model.model_id, wanted.data, loss, settings, backward=request.kind == FORWARD_BACKWARD
        )
        return Stored(PROTO, training_output({"logprobs": result.log_probs}, {"loss:sum": result.loss}))

    def _step(self, model: ModelRecord, request: Stored) -> dict[str, float]:
        return self.host.step(model.model_id, read_adam(Fields.read(request.body)))

    # --- weights --------------------------------------------------------------------------------------------

    def _load(self, model: ModelRecord, request: Stored) -> str:
        fields = Fields.read(request.body)
        path = CheckpointPath.parse(fields.text("path"))
        folder = self.store.checkpoint_folder(path.model_id, path.kind, path.name)
        if not folder.is_dir():
            raise RequestRefused(404, f"There are no weights {path}.")
        self.host.load(model.model_id, folder, optimizer=fields.flag("optimizer", False))
        return str(path)

    def _save(self, model: ModelRecord, request: Stored) -> Stored:
        name = Fields.read(request.body).checkpoint_name("path")
        written = self.store.temporary_checkpoint(model.model_id, "weights", name)
        self.host.save(model.model_id, written)
        self.store.commit_checkpoint(written, model.model_id, "weights", name)
        return _json({"path": str(CheckpointPath(model.model_id, "weights", name)), "type": SAVE})

    def _save_sampler(self, model: ModelRecord, seq: int, request: Stored) -> Stored:
        fields = Fields.read(request.body)
        name = f"{EPHEMERAL}{seq:012d}"
        if fields.has("path"):
            name = fields.checkpoint_name("path")
            if name.startswith(EPHEMERAL):
                raise RequestRefused(
                    400, f"{name}: names that begin with {EPHEMERAL} are given by the service."
                )
        path = str(CheckpointPath(model.model_id, "sampler_weights", name))
        written = self.store.temporary_checkpoint(model.model_id, "sampler_weights", name)
        self.host.save_sampler(model.model_id, written)
        self.store.commit_checkpoint(written, model.model_id, "sampler_weights", name)
        self.withdraw(path)  # an older one of that name
        self.publish(path)
        if fields.has("path"):
            return _json({"path": path, "type": SAVE_SAMPLER})
        self._drop_old_samplers(model)
        number = fields.integer("sampling_session_seq_id")
        sampler_id = f"{model.session_id}:sample:{number}"
        record = SamplerRecord(sampler_id, model.owner, model.session_id, path)
        self.store.write_sampler(record)
        return _json({"path": path, "sampling_session_id": sampler_id, "type": SAVE_SAMPLER})

    def _drop_old_samplers(self, model: ModelRecord) -> None:
        names = self.store.checkpoint_names(model.model_id, "sampler_weights")
        unnamed = [name for name in names if name.startswith(EPHEMERAL)]
        for name in unnamed[: -self.limits.ephemeral_samplers]:
            self.withdraw(str(CheckpointPath(model.model_id, "sampler_weights", name)))
            self.store.drop_checkpoint(model.model_id, "sampler_weights", name)

    # --- samplers -------------------------------------------------------------------------------------------

    def publish(self, path: str) -> None:
        """Make the weights of a path ready to sample from; the ones longest unused make room."""
        if path in self._published:
            self._published.move_to_end(path)
            return
        place = CheckpointPath.parse(path)
        folder = self.store.checkpoint_folder(place.model_id, place.kind, place.name)
        if not folder.is_dir():
            raise RequestRefused(
                404, f"There are no weights {path}. Unnamed ones are deleted when newer ones exist."
            )
        while len(self._published) >= self.limits.published:
            oldest, _ = self._published.popitem(last=False)
            self.host.withdraw(oldest)
        self.host.publish(path, folder)
        self._published[path] = None

    def is_published(self, path: str | None) -> bool:
        return path is None or path in self._published

    def withdraw(self, path: str) -> None:
        if path in self._published:
            del self._published[path]
            self.host.withdraw(path)

    # --- residency ------------------------------------------------------------------------------------------

    def _restored(self, model: ModelRecord, seq: int) -> Resident:
        """Have the model on the device as it was after the request before `seq`."""
        found = self._resident.get(model.model_id)
        if found is not None:
            self._resident.move_to_end(model.model_id)
            return found
        while len(self._resident) >= self.limits.resident:
            oldest, _ = self._resident.popitem(last=False)
            self.host.remove(oldest)
        self.host.add(model.model_id, rank=model.rank, seed=model.seed)
        found = self._resident[model.model_id] = Resident()
        try:
            self._catch_up(model, seq, found)
        except BaseException:
            self.release(model.model_id)  # with a part of its requests only, its weights are wrong
            raise
        return found

    def _catch_up(self, model: ModelRecord, seq: int, resident: Resident) -> None:
        """Load the newest snapshot, and compute the requests between it and `seq` again."""
        after, folder = self.store.snapshot(model.model_id)
        if folder is not None:
            self.host.load(model.model_id, folder, optimizer=True)
        for number, request in self.store.requests(model.model_id, after):
            if number >= seq:
                break
            answer = self.store.read_answer(model.model_id, number)
            if request.kind not in CHANGES_WEIGHTS or (answer is not None and answer.kind == ERROR):
                continue
            self._repeat(model, request, resident)

    def _repeat(self, model: ModelRecord, request: Stored, resident: Resident) -> None:
        if request.kind == FORWARD_BACKWARD:
            self._pass(model, request)
        elif request.kind == OPTIM_STEP:
            self._step(model, request)
            resident.steps += 1
        else:
            self._load(model, request)
            resident.loaded = True

    def release(self, model_id: str) -> None:
        """Free the device memory of a model; its next request restores it."""
        if self._resident.pop(model_id, None) is not None:
            self.host.remove(model_id)

    def _snapshot_if_due(self, model: ModelRecord, seq: int) -> None:
        """Save the model after a request that was answered: a snapshot makes its request unnecessary."""
        resident = self._resident.get(model.model_id)
        if resident is None:
            return
        if not resident.loaded and resident.steps < self.limits.snapshot_steps:
            return
        try:
            self.host.save(model.model_id, self.store.new_snapshot_folder(model.model_id, seq))
            self.store.commit_snapshot(model.model_id, seq)
        except Exception:  # the requests are kept, so nothing is lost; the next step tries again
            log.exception("No snapshot of %s could be written", model.model_id)
            return
        self.store.drop_answers(model.model_id, ANSWERS_KEPT)
        resident.steps = 0
        resident.loaded = False

    def close(self) -> None:
        self.host.close()


def _json(content: dict[str, object]) -> Stored:
    return Stored(JSON, to_json(content).encode())


def error_answer(message: str, category: str) -> Stored:
    return Stored(ERROR, json.dumps({"error": message, "category": category}).encode())
