"""A crash at any moment: the state folder of that moment is copied, a new service opens it, and clients go on."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from strop.rewards.server_requests import RequestRefused
from strop.serve.requests import Fields
from strop.serve.service import TrainingService
from strop.serve.start import build_service
from strop.serve.store import StateStore
from tests.serve.scene import BASE, FakeHost, pass_body, service_config

USER = "alice"
CLIENT_STEPS = 3


def open_service(state: Path, **settings: Any) -> tuple[TrainingService, FakeHost]:
    host = FakeHost()
    return build_service(service_config(state, **settings), host), host


async def answered(service: TrainingService, future: dict[str, object]) -> Any:
    found = await service.retrieve(USER, str(future["request_id"]))
    assert found is not None and found.kind != "error", found
    return found


def new_model(service: TrainingService) -> str:
    session = service.create_session(USER, Fields({}))["session_id"]
    lora = {"rank": 2, "seed": 3}
    request = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
    return str(service.create_model(USER, Fields(request))["model_id"])


def requests_of(model: str) -> list[tuple[int, str, bytes]]:
    """What a client sends: passes and steps, and weights for a sampler after each step."""
    found = []
    seq = 0
    for step in range(CLIENT_STEPS):
        for weight in (1.0, 0.5 + step):
            seq += 1
            found.append((seq, "pass", pass_body(model, seq, weights=[weight, 0.0, 1.0])))
        seq += 1
        found.append((seq, "optim_step", b'{"adam_params": {"learning_rate": 0.1}}'))
        seq += 1
        found.append((seq, "save_weights_for_sampler", b'{"sampling_session_seq_id": %d}' % step))
    return found


def send(service: TrainingService, model: str, seq: int, kind: str, body: bytes) -> dict[str, object]:
    if kind == "pass":
        return service.training_pass(USER, body)
    content = Fields.read(b'{"model_id": "%s", "seq_id": %d, %s' % (model.encode(), seq, body[1:]))
    return service.model_request(USER, kind, content, body)


async def client(service: TrainingService, model: str, first: int = 1) -> None:
    """Send everything from a number on, two requests ahead of the answers, as a real client does."""
    futures = [send(service, model, *request) for request in requests_of(model) if request[0] >= first]
    for future in futures:
        await answered(service, future)


def test_a_crash_after_any_write_loses_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    images: list[Path] = []
    root = tmp_path / "state"
    monkeypatch.setattr("os.fsync", lambda _: None)  # the copies read what was written, flushed or not

    def with_image(name: str) -> None:
        original = getattr(StateStore, name)

        def wrapped(self: StateStore, *given: Any) -> Any:
            result = original(self, *given)
            if self.root == root:
                image = tmp_path / f"image{len(images)}"
                shutil.copytree(root, image)
                images.append(image)
            return result

        monkeypatch.setattr(StateStore, name, wrapped)

    for name in ("write_model", "write_request", "write_answer", "new_snapshot_folder", "commit_snapshot"):
        with_image(name)
    with_image("write_sampler")

    async def whole() -> tuple[str, dict[str, float]]:
        service, host = open_service(root, snapshot_steps=2)
        async with service.running():
            model = new_model(service)
            await client(service, model)
            return model, dict(host.adapters[model])

    async def after_crash(image: Path, model: str) -> tuple[dict[str, float], int]:
        service, host = open_service(image, snapshot_steps=2)
        async with service.running():
            session = model.partition(":")[0]
            if model not in service.models:  # it was not accepted yet: the client asks again
                lora = {"rank": 2, "seed": 3}
                request = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": lora}
                service.create_model(USER, Fields(request))
            # Everything again, whether or not it was accepted: known numbers are not carried out twice.
            last = service.store.last_seq(model)
            known = [seq for seq in range(1, last + 1) if _is_kept(service, model, seq)]
            for seq in known:
                await answered(service, {"request_id": f"{model}:{seq}"})
            await client(service, model, last + 1)
            service.trainer.release(model)
            ready = service.trainer._restored(service.models[model], 10**6)
            assert ready.steps <= 2
            return dict(host.adapters[model]), len(service.samplers)

    model, expected = asyncio.run(whole())
    assert len(images) > 30
    for image in images:
        found, samplers = asyncio.run(after_crash(image, model))
        assert (found, samplers) == (expected, CLIENT_STEPS), image.name


def _is_kept(service: TrainingService, model: str, seq: int) -> bool:
    pending = f"{model}:{seq}" in service._pending
    return pending or service.store.read_answer(model, seq) is not None


def test_a_failed_request_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    async def scene() -> None:
        service, host = open_service(tmp_path)
        async with service.running():
            model = new_model(service)
            await answered(service, send(service, model, 1, "pass", pass_body(model, 1)))
            bad = service.training_pass(USER, pass_body(model, 2, weights=[1.0]))
            refused = await service.retrieve(USER, str(bad["request_id"]))
            assert refused is not None and refused.kind == "error" and b"weights of shape" in refused.body
            await answered(service, send(service, model, 3, "optim_step", b'{"adam_params": {}}'))
            assert host.adapters[model]["w"] == pytest.approx(-4 + 3 * 1e-4)
            # An error of the host, in the middle: the gradient of before is computed again.
            await answered(service, send(service, model, 4, "pass", pass_body(model, 4)))
            host.hold = _Raises()  # type: ignore[assignment]
            broken = service.training_pass(USER, pass_body(model, 5))
            failed = await service.retrieve(USER, str(broken["request_id"]))
            assert (
                failed is not None and b'"category": "server"' in failed.body and b"no memory" in failed.body
            )
            host.hold = None
            await answered(service, send(service, model, 6, "optim_step", b'{"adam_params": {}}'))
            assert host.adapters[model]["w"] == pytest.approx(-4 + 6 * 1e-4)

    asyncio.run(scene())


def test_requests_wait_for_a_disk_that_is_full(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("strop.serve.dispatch.DISK_PAUSE", 0.0)
    write = StateStore.write_answer
    failures = iter([False, False, True, True])

    def sometimes(store: StateStore, *given: Any) -> None:
        if next(failures, False):
            raise OSError(28, "No space left on device")
        write(store, *given)

    monkeypatch.setattr(StateStore, "write_answer", sometimes)

    async def scene() -> None:
        service, host = open_service(tmp_path)
        async with service.running():
            model = new_model(service)
            await answered(service, send(service, model, 1, "pass", pass_body(model, 1)))
            step = send(service, model, 2, "optim_step", b'{"adam_params": {}}')
            await asyncio.wait_for(answered(service, step), 10)
            assert host.adapters[model]["w"] == pytest.approx(-4 + 3 * 1e-4)  # one step, not three

    asyncio.run(scene())


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), RuntimeError("out of memory")])
def test_a_snapshot_that_comes_late_loses_no_gradient(
    tmp_path: Path, monkeypatch: Any, problem: Exception
) -> None:
    """No snapshot could be written after the step; the next one must not stand for a pass, whose gradient it lacks."""
    folder = StateStore.new_snapshot_folder
    failures = iter([True])

    def full_once(store: StateStore, *given: Any) -> Path:
        if next(failures, False):
            raise problem
        return folder(store, *given)

    monkeypatch.setattr(StateStore, "new_snapshot_folder", full_once)

    async def scene() -> None:
        service, host = open_service(tmp_path, snapshot_steps=1)
        async with service.running():
            model = new_model(service)
            for seq in (1, 3):
                await answered(service, send(service, model, seq, "pass", pass_body(model, seq)))
                service.trainer.release(model)  # others needed its place
                await answered(service, send(service, model, seq + 1, "optim_step", b'{"adam_params": {}}'))
            assert host.adapters[model]["w"] == pytest.approx(-4 + 6 * 1e-4)

    asyncio.run(asyncio.wait_for(scene(), 20))


class _Raises:
    def wait(self, seconds: float) -> bool:
        raise RuntimeError("no memory")


def test_adapters_and_samplers_that_do_not_fit_are_restored(tmp_path: Path) -> None:
    async def scene() -> None:
        service, host = open_service(tmp_path, max_adapters=1, max_samplers=1, ephemeral_samplers=2)
        async with service.running():
            models = [new_model(service), new_model(service)]
            for seq in range(1, 13, 3):
                for model in models:
                    await answered(service, send(service, model, seq, "pass", pass_body(model, seq)))
                    await answered(
                        service, send(service, model, seq + 1, "optim_step", b'{"adam_params": {}}')
                    )
                    body = b'{"sampling_session_seq_id": %d}' % seq
                    await answered(service, send(service, model, seq + 2, "save_weights_for_sampler", body))
            assert len(host.adapters) == len(host.samplers) == 1
            (weights,) = host.adapters.values()
            assert weights["w"] == pytest.approx(-4 + 12 * 1e-4) and weights["steps"] == 4
            for model in models:
                names = service.store.checkpoint_names(model, "sampler_weights")
                assert names == ["ephemeral-000000000009", "ephemeral-000000000012"]
            session = models[0].partition(":")[0]
            for seq, expected in ((10, None), (7, None), (1, "There are no weights")):
                request = {
                    "sampling_session_id": f"{session}:sample:{seq}",
                    "seq_id": 0,
                    "prompt": {"chunks": [{"tokens": [1, 2]}]},
                    "sampling_params": {"max_tokens": 1},
                }
                future = service.sample(USER, Fields(request))
                found = await service.retrieve(USER, str(future["request_id"]))
                assert found is not None
                assert found.kind == "proto" if expected is None else expected in found.body.decode()

    asyncio.run(scene())


def test_samples_after_a_restart_are_asked_for_again(tmp_path: Path) -> None:
    async def scene() -> None:
        service, _ = open_service(tmp_path)
        async with service.running():
            model = new_model(service)
            future = send(service, model, 1, "save_weights_for_sampler", b'{"sampling_session_seq_id": 0}')
            await answered(service, future)
        again, _ = open_service(tmp_path)
        async with again.running():
            sampler = f"{model.partition(':')[0]}:sample:0"
            from strop.rewards.server_requests import RequestRefused

            with pytest.raises(RequestRefused) as gone:
                await again.retrieve(USER, f"{sampler}:0")
            assert gone.value.status == 410
            request = {
                "sampling_session_id": sampler,
                "seq_id": 1,
                "prompt": {"chunks": [{"tokens": [1, 2]}]},
                "sampling_params": {"max_tokens": 1},
            }
            await answered(again, again.sample(USER, Fields(request)))

    asyncio.run(scene())


def test_a_sample_that_is_cancelled_while_somebody_waits_is_gone(tmp_path: Path) -> None:
    async def scene() -> None:
        service, _ = open_service(tmp_path)
        task = asyncio.create_task(asyncio.Event().wait())
        service._samples["s:sample:0:1"] = task  # type: ignore[assignment]
        waiting = asyncio.create_task(service._retrieve_sample("s:sample:0:1"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(RequestRefused) as refusal:
            await waiting
        assert refusal.value.status == 410

    asyncio.run(asyncio.wait_for(scene(), 10))


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), -1, True, "1"])
def test_what_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(RequestRefused, match="must be a finite number"):
        Fields({"learning_rate": value}).number("learning_rate", 1e-4)


def test_a_state_folder_belongs_to_one_model(tmp_path: Path) -> None:
    open_service(tmp_path)
    with pytest.raises(ValueError, match="belong to the model tiny/base, not to other"):
        open_service(tmp_path, base_model="other")


def test_a_model_whose_creation_was_not_stored_is_created_when_the_client_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        service, _ = open_service(tmp_path)
        async with service.running():
            with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):

                def full(*_: object) -> None:
                    raise OSError(28, "The disk is full")

                patch.setattr(service.store, "write_request", full)
                new_model(service)
            [model] = service.models
            lora = {"rank": 2, "seed": 3}
            again = {
                "session_id": model.split(":")[0],
                "model_seq_id": 0,
                "base_model": BASE,
                "lora_config": lora,
            }
            for _ in range(2):
                await answered(service, service.create_model(USER, Fields(again)))

    asyncio.run(play())


def test_a_session_with_a_full_queue_ends_and_nothing_is_trained_after_it(tmp_path: Path) -> None:
    async def play() -> None:
        service, host = open_service(tmp_path, max_pending=2)
        async with service.running():
            model = new_model(service)
            await answered(service, {"request_id": f"{model}:0"})
            host.hold = threading.Event()
            for seq in (1, 2):
                service.training_pass(USER, pass_body(model, seq, weights=[1.0, 0.0, 1.0]))
            body = b'{"model_id": "%s"}' % model.encode()
            unload = service.model_request(USER, "unload_model", Fields.read(body), body)
            for seq in (3, 4):
                with pytest.raises(RequestRefused, match="was unloaded"):
                    service.training_pass(USER, pass_body(model, seq, weights=[1.0, 0.0, 1.0]))
            service.finish_session(USER, model.split(":")[0])
            host.hold.set()
            await answered(service, unload)
            assert not host.adapters

    asyncio.run(play())


def test_the_services_own_names_are_refused(tmp_path: Path) -> None:
    """A named one would take the place of the newest unnamed one, which would be deleted at once."""

    async def play() -> None:
        service, _ = open_service(tmp_path, ephemeral_samplers=1)
        async with service.running():
            model = new_model(service)
            named = send(service, model, 1, "save_weights_for_sampler", b'{"path": "ephemeral-best"}')
            found = await service.retrieve(USER, str(named["request_id"]))
            assert found is not None and found.kind == "error" and b"given by the service" in found.body

    asyncio.run(play())


def test_one_service_at_a_time_has_a_state_folder(tmp_path: Path) -> None:
    open_service(tmp_path)
    code = f"from strop.serve.store import StateStore; from pathlib import Path; StateStore(Path({str(tmp_path)!r})).claim({BASE!r})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "belongs to a service that has not ended" in other.stderr


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
def test_a_model_that_could_not_be_restored_is_not_used_half_restored(tmp_path: Path, kind: str) -> None:
    named = b'{"path": "%s"}'

    async def play() -> None:
        service, _ = open_service(tmp_path)
        async with service.running():
            model = new_model(service)
            await client(service, model)
        service, host = open_service(tmp_path)
        working = host.step
        failures = [RuntimeError("out of memory")]

        def fails_once(*arguments: Any) -> Any:
            if failures and ("step", arguments[0]) in host.calls:  # of the second step
                raise failures.pop()
            return working(*arguments)

        host.step = fails_once  # type: ignore[method-assign]
        async with service.running():
            seq = requests_of(model)[-1][0]
            future = send(service, model, seq + 1, kind, named % b"one")
            found = await service.retrieve(USER, str(future["request_id"]))
            assert found is not None and found.kind == "error" and b"out of memory" in found.body
            await answered(service, send(service, model, seq + 2, kind, named % b"two"))
            assert host.adapters[model]["steps"] == CLIENT_STEPS

    asyncio.run(play())
