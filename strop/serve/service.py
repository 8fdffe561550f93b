"""The service behind the HTTP handlers: sessions, models, samplers and futures of all users.

All methods run on one event loop. What belongs to another user is answered as if it did not exist.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from strop.config.schema.training_service import ServiceConfig
from strop.rewards.server_requests import RequestRefused, printable
from strop.serve.dispatch import Dispatcher, TrainingJob
from strop.serve.losses import find_loss
from strop.serve.messages import read_training_pass, sample_output
from strop.serve.requests import CheckpointPath, Fields, SampleLimits, SampleRequest, read_sample_request
from strop.serve.store import ModelRecord, SamplerRecord, SessionRecord, StateStore, Stored
from strop.serve.trainer import (
    CREATE,
    FORWARD,
    FORWARD_BACKWARD,
    JSON,
    LOAD,
    PROTO,
    SAVE_SAMPLER,
    UNLOAD,
    ModelTrainer,
    error_answer,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 25.0
"""How long a request for a future waits for it; the client gives up after 45."""
FINISHED_SAMPLES_KEPT = 4096
MAX_SEED = 2**31
MAX_SEQ = 2**31
"""Of the numbers that a client gives to the requests of a model."""


class TrainingService:
    """The state of the service, and its operations."""

    def __init__(
        self, trainer: ModelTrainer, store: StateStore, settings: ServiceConfig, base_model: str
    ) -> None:
        self.trainer = trainer
        self.store = store
        self.settings = settings
        self.base_model = base_model
        self.sessions = {record.session_id: record for record in store.sessions()}
        self.models = {record.model_id: record for record in store.models()}
        self.samplers = {record.sampler_id: record for record in store.samplers()}
        self.dispatcher = Dispatcher(trainer, self._answered)
        self._last_seq = {model_id: store.last_seq(model_id) for model_id in self.models}
        self._last_seen: dict[str, float] = {}
        self._pending: dict[str, asyncio.Event] = {}
        """Futures of training requests that have no answer yet."""
        self._samples: OrderedDict[str, asyncio.Task[Stored]] = OrderedDict()
        self._running_samples: Counter[str] = Counter()
        """Per user."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Carry out requests, first those that a crash interrupted."""
        for record in list(self.models.values()):
            if not record.ended:
                self._resume(record)
        worker = asyncio.create_task(self.dispatcher.run())
        try:
            yield
        finally:
            tasks = [worker, *self._samples.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.dispatcher.close()

    def _resume(self, record: ModelRecord) -> None:
        answered = set(self.store.answered(record.model_id))
        after, _ = self.store.snapshot(record.model_id)
        for seq, request in self.store.requests(record.model_id, after):
            if seq not in answered:
                self._enqueue(TrainingJob(record, seq, request))

    # --- sessions -------------------------------------------------------------------------------------------

    def create_session(self, user: str, fields: Fields) -> dict[str, object]:
        record = SessionRecord(f"s{secrets.token_hex(12)}", user, fields.metadata("user_metadata"))
        self.store.write_session(record)
        self.sessions[record.session_id] = record
        self._last_seen[record.session_id] = time.monotonic()
        return {"session_id": record.session_id, "type": "create_session"}

    def session(self, user: str, session_id: str) -> SessionRecord:
        """An open session of the user; 404 if there is none, 410 if it has ended."""
        record = self.sessions.get(session_id)
        if record is None or record.owner != user:
            raise _absent("session", session_id)
        if record.ended:
            raise RequestRefused(410, f"The session {session_id} has ended.")
        self._last_seen[session_id] = time.monotonic()
        return record

    def finish_session(self, user: str, session_id: str) -> None:
        """End a session: its models are unloaded, and only their named weights are kept."""
        record = self.sessions.get(session_id)
        if record is None or record.owner != user:
            raise _absent("session", session_id)
        self.sessions[session_id] = replace(record, ended=True)
        self.store.write_session(self.sessions[session_id])
        for model in list(self.models.values()):
            if model.session_id == session_id and not model.ended:
                self._submit(model, self._last_seq[model.model_id] + 1, Stored(UNLOAD, b"{}"))
        for sampler in list(self.samplers.values()):
            if sampler.session_id == session_id:
                del self.samplers[sampler.sampler_id]
                self.store.drop_sampler(sampler.sampler_id)

    # --- models ---------------------------------------------------------------------------------------------

    def create_model(self, user: str, fields: Fields) -> dict[str, object]:
        session = self.session(user, fields.text("session_id"))
        number = fields.integer("model_seq_id", high=10**9)
        model_id = f"{session.session_id}:train:{number}"
        if model_id in self.models:  # the client asks again: its connection broke, or the disk was full
            if self._last_seq[model_id] < 0:
                return self._submit(self.models[model_id], 0, Stored(CREATE, b"{}"))
            return _future(model_id, 0)
        self._check_base_model(fields.text("base_model"))
        lora = fields.object("lora_config")
        for name in ("train_mlp", "train_attn"):
            if not lora.flag(name, True):
                raise RequestRefused(400, f"{name}=false is not offered: adapters change all linear layers.")
        self._check_room(user)
        seed = lora.optional_integer("seed", low=-(2**62))
        record = ModelRecord(
            model_id=model_id,
            owner=user,
            session_id=session.session_id,
            rank=lora.integer("rank", low=1, high=self.settings.max_lora_rank),
            seed=secrets.randbelow(MAX_SEED) if seed is None else seed % MAX_SEED,
            created=time.time(),
            metadata=fields.metadata("user_metadata"),
        )
        self.store.write_model(record)
        self.models[model_id] = record
        self._last_seq[model_id] = -1
        return self._submit(record, 0, Stored(CREATE, b"{}"))

    def _check_base_model(self, name: str) -> None:
        if name != self.base_model:
            raise RequestRefused(400, f"This service has the model {self.base_model}, not {printable(name)}.")

    def _check_room(self, user: str) -> None:
        limit = self.settings.max_adapters_per_user
        now = time.monotonic()
        active = 0
        for model in self.models.values():
            idle = now - self._last_seen.get(model.session_id, -math.inf)
            if model.owner == user and not model.ended and idle < self.settings.session_timeout:
                active += 1
        if active >= limit:
            raise RequestRefused(
                400,
                f"You have {active} models in training; the limit is {limit} "
                "(server.max_adapters_per_user). End a session first: service_client.close('success').",
            )

    def model(self, user: str, model_id: str) -> ModelRecord:
        """A model of the user, whose session is open."""
        record = self.models.get(model_id)
        if record is None or record.owner != user:
            raise _absent("model", model_id)
        if record.ended:
            raise RequestRefused(410, f"The model {model_id} was unloaded; only its weights are left.")
        self.session(user, record.session_id)
        return record

    def training_pass(self, user: str, body: bytes) -> dict[str, object]:
        """forward_backward, or forward alone."""
        wanted = read_training_pass(body)
        model = self.model(user, wanted.model_id)
        find_loss(wanted.loss)
        if not wanted.data:
            raise RequestRefused(400, "The request has no data.")
        if not 0 <= wanted.seq_id <= MAX_SEQ:
            raise RequestRefused(
                400, f"seq_id must be a whole number from 0 to {MAX_SEQ}, it is {wanted.seq_id}."
            )
        limit = self.settings.max_batch_tokens
        if wanted.num_tokens > limit:
            raise RequestRefused(
                413,
                f"The request has {wanted.num_tokens} tokens; the limit is {limit}. Send fewer at a time.",
            )
        kind = FORWARD if wanted.forward_only else FORWARD_BACKWARD
        return self._submit(model, wanted.seq_id, Stored(kind, body))

    def model_request(self, user: str, kind: str, fields: Fields, body: bytes) -> dict[str, object]:
        """optim_step, save_weights, save_weights_for_sampler, load_weights or unload_model."""
        model = self.model(user, fields.text("model_id"))
        if kind == LOAD:
            self._check_weights(user, model, fields)
        if kind == UNLOAD:
            return self._submit(model, self._last_seq[model.model_id] + 1, Stored(kind, body))
        if kind == SAVE_SAMPLER and not fields.has("path"):
            fields.integer("sampling_session_seq_id", high=10**9)
        return self._submit(model, fields.integer("seq_id", high=MAX_SEQ), Stored(kind, body))

    def _check_weights(self, user: str, model: ModelRecord, fields: Fields) -> None:
        source = self.weights(user, CheckpointPath.parse(fields.text("path")))
        if source.rank != model.rank:
            raise RequestRefused(
                400,
                f"The weights have rank {source.rank} and the model has rank {model.rank}; both must agree.",
            )

    def weights(self, user: str, path: CheckpointPath) -> ModelRecord:
        """The model that saved these weights; 404 if the user has no such weights."""
        record = self.models.get(path.model_id)
        if record is None or record.owner != user:
            raise _absent("weights", str(path))
        if not self.store.checkpoint_folder(path.model_id, path.kind, path.name).is_dir():
            raise _absent("weights", str(path))
        return record

    # --- training futures -----------------------------------------------------------------------------------

    def _submit(self, model: ModelRecord, seq: int, request: Stored) -> dict[str, object]:
        """Accept a request: it is durable when this returns. The same number again is the same request."""
        last = self._last_seq[model.model_id]
        if seq <= last:
            is_known = f"{model.model_id}:{seq}" in self._pending
            if not is_known and self.store.read_answer(model.model_id, seq) is None:
                raise RequestRefused(400, f"seq_id {seq} comes after {last}; numbers must rise.")
            return _future(model.model_id, seq)
        waiting = sum(1 for name in self._pending if name.startswith(f"{model.session_id}:"))
        if waiting >= self.settings.max_pending and request.kind != UNLOAD:  # which makes room
            raise RequestRefused(429, f"{waiting} requests of this session wait; the limit is reached.")
        self.store.write_request(model.model_id, seq, request)
        self._last_seq[model.model_id] = seq
        self._enqueue(TrainingJob(model, seq, request))
        return _future(model.model_id, seq)

    def _enqueue(self, job: TrainingJob) -> None:
        self._pending[f"{job.model.model_id}:{job.seq}"] = asyncio.Event()
        if job.request.kind == UNLOAD:  # no request may follow it
            self.models[job.model.model_id] = replace(job.model, ended=True)
        self.dispatcher.enqueue(job)

    def _answered(self, job: TrainingJob, answer: Stored) -> None:
        if answer.kind == JSON and job.request.kind == SAVE_SAMPLER:
            fields = Fields.read(answer.body)
            sampler_id = fields.optional_text("sampling_session_id")
            if sampler_id is not None:
                self.samplers[sampler_id] = SamplerRecord(
                    sampler_id, job.model.owner, job.model.session_id, fields.text("path")
                )
        if job.request.kind == UNLOAD:
            self.store.end_model(job.model)
        self._pending.pop(f"{job.model.model_id}:{job.seq}").set()

    async def retrieve(self, user: str, request_id: str) -> Stored | None:
        """The answer to a request; None if it is not there yet."""
        owner_id, _, number = request_id.rpartition(":")
        if owner_id in self.samplers and self.samplers[owner_id].owner == user:
            return await self._retrieve_sample(request_id)
        model = self.models.get(owner_id)
        is_number = number.isdecimal() and len(number) <= len(str(MAX_SEQ))
        if model is None or model.owner != user or not is_number:
            raise _absent("future", request_id)
        self._last_seen[model.session_id] = time.monotonic()
        pending = self._pending.get(request_id)
        if pending is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(pending.wait(), POLL_SECONDS)
        if request_id in self._pending:
            return None
        answer = self.store.read_answer(owner_id, int(number))
        if answer is None:
            raise RequestRefused(410, f"The answer to {printable(request_id)} is not kept any more.")
        return answer

    # --- samplers -------------------------------------------------------------------------------------------

    def create_sampler(self, user: str, fields: Fields) -> dict[str, object]:
        session = self.session(user, fields.text("session_id"))
        number = fields.integer("sampling_session_seq_id", high=10**9)
        path = fields.optional_text("model_path")
        if path is None:
            self._check_base_model(fields.text("base_model"))
        else:
            place = CheckpointPath.parse(path)
            self.weights(user, place)
            if place.kind != "sampler_weights":
                raise RequestRefused(
                    400, f"{path} is for training. Sample from weights of save_weights_for_sampler."
                )
        record = SamplerRecord(f"{session.session_id}:sample:{number}", user, session.session_id, path)
        self.store.write_sampler(record)
        self.samplers[record.sampler_id] = record
        return {"sampling_session_id": record.sampler_id, "type": "create_sampling_session"}

    def sampler(self, user: str, sampler_id: str) -> SamplerRecord:
        record = self.samplers.get(sampler_id)
        if record is None or record.owner != user:
            raise _absent("sampler", sampler_id)
        return record

    def sample(self, user: str, fields: Fields) -> dict[str, object]:
        """Start to sample; the same number again is the same request."""
        sampler = self.sampler(user, fields.text("sampling_session_id"))
        self.session(user, sampler.session_id)
        request_id = f"{sampler.sampler_id}:{fields.integer('seq_id')}"
        facts = self.trainer.host.facts
        limits = SampleLimits(facts.vocabulary, facts.context, self.settings.max_samples)
        request = read_sample_request(fields, limits)
        if request_id not in self._samples:
            if self._running_samples[user] >= self.settings.max_pending:
                raise RequestRefused(429, "Too many of your samples run; send more when some have finished.")
            self._running_samples[user] += 1
            task = asyncio.create_task(self._sample(sampler, request))
            task.add_done_callback(lambda _: self._running_samples.subtract([user]))
            self._samples[request_id] = task
            self._forget_old_samples()
        ids = [f"{request_id}:{index}" for index in range(request.n)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sample(self, sampler: SamplerRecord, request: SampleRequest) -> Stored:
        seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed % MAX_SEED
        try:
            scores = None
            if request.prompt_log_probs:
                found = await self.dispatcher.score(sampler.path, request.prompt)
                scores = [math.nan, *found]
                if request.last_n is not None:
                    hidden = len(scores) - request.last_n
                    scores = [math.nan] * hidden + scores[hidden:]
            samples = await self.dispatcher.sample(sampler.path, request, seed)
        except (RequestRefused, ValueError) as error:
            return error_answer(str(error), "user")
        except Exception as error:
            log.exception("A sample of %s failed", sampler.sampler_id)
            return error_answer(f"{type(error).__name__}: {error}", "server")
        return Stored(PROTO, sample_output(samples, scores))

    def _forget_old_samples(self) -> None:
        """Keep the results that were started last; a result is read soon after it is there."""
        for request_id, task in list(self._samples.items()):
            if len(self._samples) <= FINISHED_SAMPLES_KEPT:
                return
            if task.done():
                del self._samples[request_id]

    async def _retrieve_sample(self, request_id: str) -> Stored | None:
        task = self._samples.get(request_id)
        if task is not None:
            done, _ = await asyncio.wait([task], timeout=POLL_SECONDS)
            if not done:
                return None
            if not task.cancelled():
                return task.result()
        # Samples do not survive a restart or `cancel_sample`; on 410 the client sends the request again.
        raise RequestRefused(410, f"The sample {printable(request_id)} is not known; send it again.")

    def cancel_sample(self, user: str, request_id: str) -> None:
        owner_id = request_id.rpartition(":")[0]
        self.sampler(user, owner_id)
        task = self._samples.pop(request_id, None)
        if task is not None:
            task.cancel()


def _future(model_id: str, seq: int) -> dict[str, object]:
    return {"request_id": f"{model_id}:{seq}", "model_id": model_id}


def _absent(kind: str, name: str) -> RequestRefused:
    return RequestRefused(404, f"There is no {kind} {printable(name)}.")
