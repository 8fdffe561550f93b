"""SIGTERM and SIGINT: a checkpoint, exit code 79, and a resumed run that equals one that was never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from strop import stopping
from strop.cli import main
from strop.errors import CRASHED, STOPPED
from strop.ppo.collect import Collector
from strop.ppo.trainer import PpoTrainer
from strop.ranks import Ranks, SharedFailure
from strop.run.checkpoint.layout import read_manifest
from strop.run.heartbeat import STOPPED_BY_SIGNAL, read_worker_states
from strop.stopping import StopRequested, deferred, droppable, handle_stop_signals, requested
from strop.supervised.trainer import SupervisedTrainer
from tests.http_servers import PatientServer
from tests.ppo.runs import metrics, same
from tests.runtime.started import CLOCKS, Started, assert_same_run
from tests.supervised.runs import VERBS, make_task
from tests.supervised.runs import settings as supervised_settings
from tests.supervised.runs import weights as supervised_weights


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


# --- the handlers -------------------------------------------------------------------------------------------


@pytest.fixture
def interruptible():
    """A shell starts background jobs with SIGINT ignored, and Python then leaves it so."""
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_where_a_signal_is_noted_and_where_it_raises(interruptible, monkeypatch):
    with handle_stop_signals(60):
        with deferred():
            send()
            assert requested() == signal.SIGTERM
            with pytest.raises(StopRequested), droppable():
                raise AssertionError("not reached")
        with pytest.raises(StopRequested) as stop, deferred(), droppable():
            pass
        assert stop.value.exit_code == STOPPED
    assert requested() is None
    with handle_stop_signals(60), pytest.raises(StopRequested):  # outside of a loop
        send(signal.SIGINT)
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.0)
    with handle_stop_signals(0), pytest.raises(KeyboardInterrupt):  # no grace: as ever
        send(signal.SIGINT)


def test_a_repeat_after_the_end_does_not_change_the_exit_code(interruptible, monkeypatch):
    with pytest.raises(StopRequested), handle_stop_signals(60):
        send(signal.SIGINT)
    send(signal.SIGINT)  # the process closes; this would end it as KeyboardInterrupt
    send(signal.SIGTERM)  # and this by the signal
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):  # later ones act as ever
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handle_stop_signals(60):
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(StopRequested), handle_stop_signals(60, ends_process=False):
        send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the process of a caller goes on"


CLOSES = """
import os, signal, sys
from strop.stopping import StopRequested, handle_stop_signals
class Last:
    def __del__(self, kill=os.kill, me=os.getpid()):  # when the interpreter has removed the handlers
        kill(me, 15)
sys.modules["last"] = Last()
try:
    with handle_stop_signals(60):
        os.kill(os.getpid(), signal.SIGTERM)
except StopRequested as stop:
    sys.exit(stop.exit_code)
"""


def test_a_repeat_while_the_interpreter_ends_does_not_change_the_exit_code():
    assert subprocess.run([sys.executable, "-c", CLOSES]).returncode == STOPPED


def test_the_process_of_a_caller_goes_on(monkeypatch, caplog):
    """A run from Python never ends the process: not by a second signal, not after the grace period."""
    monkeypatch.setattr(os, "_exit", pytest.fail)
    monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.0)
    with handle_stop_signals(60, ends_process=False), deferred():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    with handle_stop_signals(0.01, ends_process=False), deferred():
        send(signal.SIGINT)
        stopping._active[-1]._watcher.join(60)
    assert "are over and the run has not ended. Interrupt again" in caplog.text


def test_signals_of_one_moment_count_once(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with handle_stop_signals(60), deferred():
        send()
        send(signal.SIGINT)
        assert not ended
        monkeypatch.setattr(stopping, "REPEAT_SECONDS", 0.0)
        send(signal.SIGINT)
        assert ended == [128 + signal.SIGINT]


def test_the_grace_period_ends(monkeypatch):
    ended = threading.Event()
    codes = []
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    with handle_stop_signals(0.05), deferred():
        send()
        assert ended.wait(60)
    assert codes == [128 + signal.SIGTERM]


def test_a_forked_child_dies_of_the_signal():
    ready, say_ready = os.pipe()
    with handle_stop_signals(60), deferred():
        child = os.fork()
        if not child:
            os.write(say_ready, b"1")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)  # Python drops signals that reach a child before fork() has returned in it
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert requested() is None


class TwoRanks(Ranks):
    """Rank 0 of two; the other one reports what the test says."""

    def all_gather_object(self, value):
        return [value, OTHER[0]]


OTHER: list[object] = [None]


def test_ranks_drop_their_work_together():
    ranks = TwoRanks(0, 2)
    OTHER[0] = (None, signal.SIGTERM)
    with pytest.raises(StopRequested):  # the signal came to the other rank
        ranks.run_or_raise_on_all(lambda: 1, "sampling", can_drop=True)
    OTHER[0] = (("ValueError: x", 1), None)
    with pytest.raises(SharedFailure):
        ranks.run_or_raise_on_all(lambda: 1, "sampling", can_drop=True)
    OTHER[0] = (None, None)
    with handle_stop_signals(60), deferred():
        send()
        assert ranks.run_or_raise_on_all(lambda: 1, "saving") == 1  # this must not be interrupted
        with pytest.raises(StopRequested):
            ranks.run_or_raise_on_all(lambda: 1, "sampling", can_drop=True)


# --- ppo ----------------------------------------------------------------------------------------------------


def run_ppo(overrides, folder, *more):
    words = [word for word in overrides if "default_local_dir" not in word]
    return main(["ppo", *words, f"trainer.default_local_dir={folder}", "trainer.save_freq=4", *more])


@pytest.fixture(scope="module")
def calm_runs():
    return {}


def checkpoints(folder: Path) -> set[int]:
    return {int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*")}


PLACES = {
    # the method that is interrupted, at which step, and the step of the checkpoint
    "scoring": (Collector, "score", 3, 2),
    "sampling": (Collector, "_sample", 3, 2),
    "first step": (Collector, "_sample", 1, None),
    "update": (PpoTrainer, "update_actor", 3, 3),
    "validation": (PpoTrainer, "validate", 2, 2),
    "last step": (PpoTrainer, "update_actor", 4, 4),
}


@pytest.mark.parametrize(
    "place",
    [
        "scoring",
        "update",
        "validation",
        pytest.param("sampling", marks=pytest.mark.slow),
        pytest.param("first step", marks=pytest.mark.slow),
        pytest.param("last step", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    overrides, calm_runs, place, tmp_path, tmp_path_factory, monkeypatch
):
    if "calm" not in calm_runs:
        calm_runs["calm"] = tmp_path_factory.mktemp("calm")
        assert run_ppo(overrides, calm_runs["calm"]) == 0
    owner, name, step, saved = PLACES[place]
    method = getattr(owner, name)
    trainer = []
    fit = PpoTrainer.fit

    def remember(self):
        trainer[:] = [self]
        fit(self)

    def interrupted(self, *arguments, **named):
        result = None
        if trainer[0].step == step and requested() is None:
            if owner is PpoTrainer:
                result = method(self, *arguments, **named)
            send()
            if name == "validate":
                raise StopRequested(signal.SIGTERM)  # as its sampling does
            return result
        return method(self, *arguments, **named)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(PpoTrainer, "fit", remember)
        patch.setattr(owner, name, interrupted)
        code = run_ppo(overrides, folder)
    assert code == STOPPED  # also in the last step, whose validation is dropped
    assert checkpoints(folder) == ({saved} - {None})
    assert [worker.phase for worker in read_worker_states(folder)] == [STOPPED_BY_SIGNAL]
    assert run_ppo(overrides, folder) == 0
    assert_same_run(calm_runs["calm"], folder, 4)


RANDOM_SCORES = """
import random
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return random.random()
"""


def test_a_signal_after_a_validation_does_not_give_its_random_numbers_out_again(
    overrides, tmp_path, monkeypatch
):
    (tmp_path / "reward.py").write_text(RANDOM_SCORES)
    random_scores = f"custom_reward_function.path={tmp_path}/reward.py"
    assert run_ppo(overrides, tmp_path / "calm", random_scores) == 0
    validate_if_due = PpoTrainer.validate_if_due

    def signalled(self, record, state):
        validate_if_due(self, record, state)
        if self.step == 2:
            send()

    with monkeypatch.context() as patch:
        patch.setattr(PpoTrainer, "validate_if_due", signalled)
        assert run_ppo(overrides, tmp_path / "run", random_scores) == STOPPED
    assert checkpoints(tmp_path / "run") == {2}
    assert run_ppo(overrides, tmp_path / "run", random_scores) == 0
    assert_same_run(tmp_path / "calm", tmp_path / "run", 4)


def test_a_signal_right_after_a_resume_keeps_what_the_checkpoint_says(overrides, tmp_path, monkeypatch):
    """The folder is relative, as by default. Which checkpoint is the best depends on these metrics."""
    monkeypatch.chdir(tmp_path)
    more = ["trainer.save_freq=2", "trainer.total_training_steps=2"]
    assert run_ppo(overrides, "run", *more) == 0
    before = read_manifest(Path("run/global_step_2"))
    assert before.metrics
    sample = Collector._sample

    def interrupted(self, draw, prompts, step, first):
        send()
        return sample(self, draw, prompts, step, first)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "_sample", interrupted)
        assert run_ppo(overrides, "run") == STOPPED
    assert read_manifest(Path("run/global_step_2")) == before, "it was not written again"
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "_sample", interrupted)
        assert run_ppo(overrides, "run", "trainer.del_local_ckpt_after_load=true") == STOPPED
    assert read_manifest(Path("run/global_step_2")).metrics == before.metrics, "it was written again"
    assert run_ppo(overrides, "run", "trainer.test_freq=-1") == 0
    assert not read_manifest(Path("run/global_step_4")).metrics, "its weights were not validated"


def test_without_checkpoints_the_exit_code_is_that_of_the_signal(overrides, tmp_path, monkeypatch, caplog):
    sample = Collector._sample

    def interrupted(self, draw, prompts, step, first):
        if step == 2:
            send(signal.SIGINT)
        return sample(self, draw, prompts, step, first)

    monkeypatch.setattr(Collector, "_sample", interrupted)
    assert run_ppo(overrides, tmp_path / "run", "trainer.save_freq=-1") == 128 + signal.SIGINT
    assert not checkpoints(tmp_path / "run")
    assert any("trainer.save_freq=-1: no checkpoint is written" in text for text in caplog.messages)


def test_a_signal_in_the_first_step_does_not_speak_of_a_checkpoint(overrides, tmp_path, monkeypatch, caplog):
    sample = Collector._sample

    def interrupted(self, draw, prompts, step, first):
        send()
        return sample(self, draw, prompts, step, first)

    monkeypatch.setattr(Collector, "_sample", interrupted)
    assert run_ppo(overrides, tmp_path / "run") == STOPPED
    assert not checkpoints(tmp_path / "run")
    assert "Step 1 is dropped. Nothing is trained yet; the same command starts again." in caplog.messages


def test_a_run_that_always_starts_over_says_how_to_resume(overrides, tmp_path, monkeypatch, caplog):
    """examples/quickstart.yaml sets resume_mode=disable, so the same command would not resume."""
    sample = Collector._sample

    def interrupted(self, draw, prompts, step, first):
        if step == 2:
            send()
        return sample(self, draw, prompts, step, first)

    monkeypatch.setattr(Collector, "_sample", interrupted)
    assert run_ppo(overrides, tmp_path / "run", "trainer.resume_mode=disable") == STOPPED
    assert "the same command with trainer.resume_mode=auto resumes from it" in caplog.text


def test_helpers_that_the_signal_ended_too_do_not_spoil_the_checkpoint(overrides, tmp_path, monkeypatch):
    score = Collector.score

    def broken(self, trajectories):
        if requested() is None and len(trajectories) and broken.calls == 3:
            handlers = stopping._active[-1]
            handlers.droppable = False  # so that the failure comes before the signal is seen
            send()
            raise OSError("a worker is gone")
        broken.calls += 1
        return score(self, trajectories)

    broken.calls = 0
    monkeypatch.setattr(Collector, "score", broken)
    more = ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    assert run_ppo(overrides, tmp_path / "run", *more) == STOPPED
    assert checkpoints(tmp_path / "run") == {3}


def test_a_reward_server_that_stays_away_leaves_a_checkpoint(overrides, tmp_path, capsys):
    """It answers two steps, goes away for longer than the timeout, and comes back for the same command."""
    answered = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if len(answered) == 2:
                self.connection.close()
                return
            answered.append(len(question["query"]))
            body = json.dumps({"rewards": [float(len(text) % 3) for text in question["query"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = PatientServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    more = [
        f"reward_model.remote_url=http://127.0.0.1:{server.server_port}/get_reward",
        "reward_model.timeout=1.5",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    assert run_ppo(overrides, tmp_path / "run", *more) == CRASHED
    said = capsys.readouterr().err
    assert "none of them within reward_model.timeout" in said
    assert checkpoints(tmp_path / "run") == {2}
    answered.append(0)
    assert run_ppo(overrides, tmp_path / "run", *more) == 0
    server.shutdown()
    server.server_close()


# --- processes ----------------------------------------------------------------------------------------------


def words_of(overrides):
    words = [word for word in overrides if not word.startswith(("trainer.default_local_dir", "trainer.save"))]
    return [*words, "trainer.device=cpu", "trainer.save_freq=4"]


def signalled(run: Started, number=signal.SIGTERM) -> int:
    """Send a signal to the command when rank 0 is in step 2."""
    run.wait_for(lambda beat: beat.step == 2)
    os.kill(run.process.pid, number)
    return run.end()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_process(overrides, tmp_path, number):
    calm = Started(words_of(overrides), tmp_path / "calm")
    assert calm.end() == 0, calm.said()
    run = Started(words_of(overrides), tmp_path / "run")
    assert signalled(run, number) == STOPPED, run.said()
    assert checkpoints(run.folder) <= {1, 2}
    again = Started(words_of(overrides), tmp_path / "run")
    assert again.end() == 0, again.said()
    assert_same_run(calm.folder, again.folder, 4)


@pytest.mark.slow
def test_ranks_of_this_machine(overrides, tmp_path):
    words = [*words_of(overrides), "trainer.n_gpus_per_node=2", "trainer.max_restarts=1"]
    calm = Started(words, tmp_path / "calm")
    assert calm.end() == 0, calm.said()
    run = Started(words, tmp_path / "run")
    assert signalled(run) == STOPPED, run.said()
    assert checkpoints(run.folder) <= {1, 2} and "Starting again" not in run.said()
    again = Started(words, tmp_path / "run")
    assert again.end() == 0, again.said()
    assert_same_run(calm.folder, again.folder, 4)


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all(overrides, tmp_path):
    run = Started([*words_of(overrides), "trainer.n_gpus_per_node=2"], tmp_path / "run")
    beat = run.wait_for(lambda beat: beat.rank == 1 and beat.step == 2)
    os.kill(beat.pid, signal.SIGTERM)
    assert run.end() == STOPPED, run.said()
    assert checkpoints(run.folder) <= {1, 2}


@pytest.mark.slow
def test_ranks_on_ray(overrides, tmp_path):
    pytest.importorskip("ray")
    words = [*words_of(overrides), "trainer.n_gpus_per_node=2"]
    calm = Started(words, tmp_path / "calm")
    assert calm.end() == 0, calm.said()
    words.append("trainer.runtime=ray")
    run = Started(words, tmp_path / "run")
    assert signalled(run) == STOPPED, run.said()
    again = Started(words, tmp_path / "run")
    assert again.end() == 0, again.said()
    assert_same_run(calm.folder, again.folder, 4)


SLEEPER = """
import os, signal, sys, time
from pathlib import Path
own = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: Path(sys.argv[1], f"{own} was asked").touch())
Path(sys.argv[1], own).touch()
time.sleep(600)
"""


def wait_for(*files):
    deadline = time.monotonic() + 300
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("signals", [1, 2])
def test_ranks_that_do_not_end_are_killed(tmp_path, signals):
    """After the grace period, or at the second signal."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    code = f"""
import sys
from pathlib import Path
from strop.runtime import local
from strop import stopping
stopping.REPEAT_SECONDS = 0.0
local.GRACE_SECONDS = 0.2
command = [sys.executable, {str(tmp_path / "sleeper.py")!r}, {str(tmp_path)!r}]
failure = local.run_ranks(command, 2, Path({str(tmp_path)!r}), grace={0.2 if signals == 1 else 600})
sys.exit(failure.exit_code)
"""
    starter = subprocess.Popen([sys.executable, "-c", code])
    wait_for(tmp_path / "0", tmp_path / "1")
    starter.send_signal(signal.SIGTERM)
    if signals == 2:
        wait_for(tmp_path / "0 was asked")  # before that, a second signal would be part of the first
        starter.send_signal(signal.SIGTERM)
    assert starter.wait(300) == 128 + signal.SIGTERM


# --- sft, rm, dpo -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("stopping"))


@pytest.mark.parametrize(
    ("verb", "place"),
    [
        ("sft", "validation"),
        *(pytest.param(verb, "update", marks=pytest.mark.slow) for verb in VERBS),
    ],
)
def test_supervised_runs_go_on(small, verb, place, tmp_path, monkeypatch):
    def run(name):
        words = supervised_settings(small, tmp_path / name, verb)
        words += ["trainer.total_training_steps=4", "trainer.save_freq=4", "trainer.test_freq=2"]
        return main([verb, *words])

    assert run("calm") == 0
    name = {"update": "update", "validation": "validate"}[place]
    method = getattr(SupervisedTrainer, name)

    def interrupted(self, *arguments):
        if self.step == 2:
            send()
        return method(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedTrainer, name, interrupted)
        assert run("run") == STOPPED
    assert checkpoints(tmp_path / "run") == {2}
    assert run("run") == 0
    assert same(supervised_weights(tmp_path / "calm", 4), supervised_weights(tmp_path / "run", 4))
    expected, found = metrics(tmp_path / "calm"), metrics(tmp_path / "run")
    assert expected.keys() == found.keys()
    for step, row in expected.items():
        for key in (key for key in row if not key.startswith(CLOCKS)):
            assert found[step][key] == row[key], (step, key)
