"""The board over HTTP: who may ask, what is answered, and everything that is tried on it."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from strop.board.describe import plan
from strop.board.serve import checked_token, main
from strop.config.arithmetic import plan_ppo
from strop.config.compose import load
from strop.run.heartbeat import Heartbeat, lock_file
from tests.board.scene import CONFIG, answer, line, metrics, serving, write_run, write_step

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "one")
    other = json.loads(json.dumps(CONFIG))
    other["actor_rollout_ref"]["actor"]["optim"]["lr"] = 5e-6
    write_run(root / "deep" / "er" / "two", shift=0.1, config=other)
    (root / "secret.txt").write_text("not yours")
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with serving(root) as url:
        yield url


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """The path goes out as it is: no client tidies it up."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    reply = connection.getresponse()
    body = reply.read()
    is_json = "json" in reply.headers.get("content-type", "")
    return reply.status, json.loads(body) if is_json else body, dict(reply.headers)


def runs(url: str) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in ask(url, "/api/runs")[1]["runs"]}


def test_runs_are_found_wherever_they_lie(url: str) -> None:
    found = runs(url)
    assert list(found) == ["deep/er/two", "one"]
    one = found["one"]
    assert (one["step"], one["total"], one["algorithm"], one["model"]) == (40, 40, "grpo", "models/tiny")
    assert one["alerts"] == 1 and one["checkpoints"] == 2 and one["samples"] == {"train": 4, "validation": 5}
    assert one["metrics"]["val-core/sums/acc/mean@1"] == pytest.approx(0.9) and one["state"] == "finished"


def test_curves_of_several_runs(url: str) -> None:
    ids = {name: run["id"] for name, run in runs(url).items()}
    path = (
        "/api/curves?"
        + "&".join(f"run={i}" for i in ids.values())
        + "&metric=critic%2Fscore%2Fmean&metric=nothing&points=12"
    )
    status, found, _ = ask(url, path)
    assert status == 200 and set(found) == set(ids.values())
    for curves in found.values():
        assert list(curves) == ["critic/score/mean"] and 2 < len(curves["critic/score/mean"]["step"]) <= 14
    assert ask(url, "/api/curves?run=" + ids["one"] + "".join(f"&metric=m{i}" for i in range(401)))[0] == 400


def test_every_point_of_one_metric(tmp_path: Path) -> None:
    write_run(tmp_path / "long")
    with (tmp_path / "long" / "metrics.jsonl").open("w") as file:
        file.writelines(line(step, loss=1.0 / (step + 1)) for step in range(3000))
    with serving(tmp_path) as url:
        run = runs(url)["long"]["id"]
        _, drawn, _ = ask(url, f"/api/curves?run={run}&metric=loss&points=9999")
        _, whole, _ = ask(url, f"/api/curves?run={run}&metric=loss&whole=1")
        assert len(drawn[run]["loss"]["step"]) <= 2000 and whole[run]["loss"]["step"] == list(range(3000))


def test_one_broken_run_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "well")
    broken = write_run(tmp_path / "broken")
    (broken / "metrics.jsonl").unlink()
    (broken / "metrics.jsonl").symlink_to("/nowhere")
    odd = {"trainer": {"project_name": {"a": [1]}, "total_training_steps": "x"}, "algorithm": 7}
    (broken / "metrics.config.json").write_text(json.dumps(odd))
    (broken / "workers").write_text("no folder")
    with serving(tmp_path) as url:
        found = runs(url)
        assert found["well"]["damaged"] == [] and found["broken"]["damaged"]
        assert found["broken"]["project"] is None and found["broken"]["algorithm"] is None
        ids = [found[name]["id"] for name in ("broken", "well")]
        _, curves, _ = ask(url, f"/api/curves?run={ids[0]}&run={ids[1]}&run=gone&metric=actor%2Fentropy")
        assert len(curves[ids[1]]["actor/entropy"]["step"]) == 41
        assert ask(url, "/api/curves?run=gone&metric=actor%2Fentropy")[0] == 404


def test_runs_that_differ_in_seeds_and_names_are_one_family(tmp_path: Path) -> None:
    for name, seed, lr in (("a", 1, 1e-6), ("b", 2, 1e-6), ("c", 1, 2e-6)):
        config = json.loads(json.dumps(CONFIG))
        config["trainer"] |= {"seed": seed, "experiment_name": name}
        config["actor_rollout_ref"]["actor"]["optim"]["lr"] = lr
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.config.json").write_text(json.dumps(config))
    with serving(tmp_path) as url:
        family = {name: run["family"] for name, run in runs(url).items()}
    assert family["a"] == family["b"] != family["c"]


def test_the_configuration_and_its_arithmetic(url: str) -> None:
    found = runs(url)
    one, two = (ask(url, f"/api/runs/{found[name]['id']}/config")[1] for name in ("one", "deep/er/two"))
    key = "actor_rollout_ref.actor.optim.lr"
    assert {k for k in one["values"] if one["values"][k] != two["values"][k]} == {key} and one["values"][
        key
    ] == 1e-6
    plan = {what: value for what, value, _ in one["plan"]}
    assert (
        plan["sequences per step"] == "32"
        and plan["accumulation per update"] == "8"
        and plan["policy"] == "on-policy"
    )


def test_checkpoints_and_alerts(root: Path, url: str) -> None:
    run = runs(url)["one"]["id"]
    newest, older = ask(url, f"/api/runs/{run}/checkpoints")[1]["checkpoints"]
    assert newest["step"] == 40 and newest["latest"] and not older["latest"] and "problem" not in newest
    assert newest["metrics"] == {"val-core/sums/acc/mean@1": 0.8}
    (alert,) = ask(url, f"/api/runs/{run}/alerts")[1]["alerts"]
    assert alert["name"] == "entropy_collapse" and "learning rate" in alert["advice"]


def test_everything_stays_within_the_folder(root: Path, url: str) -> None:
    run = runs(url)["one"]["id"]
    tried = [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/%2e%2e/app.py",
        "/static//etc/passwd",
        "/../secret.txt",
        "/api/runs/..%2f..%2fsecret.txt/config",
        f"/api/runs/{run}/samples/..%2f..%2fsecret",
        f"/api/runs/{run}/samples/%2e%2e/1/1",
        f"/api/runs/{run}/samples/train/1/1/1/text/..%2f..",
        f"/api/runs/{run}/samples/train/-1/1",
        f"/api/runs/{run}%00/config",
        "/api/runs/" + "a" * 5000 + "/config",
    ]
    for path in tried:
        status, body, _ = ask(url, path)
        assert status in (400, 404), (path, status)
        assert "not yours" not in str(body) and "root:" not in str(body) and str(root) not in str(body), path


def test_values_that_make_no_sense_are_refused_with_a_reason(url: str) -> None:
    run = runs(url)["one"]["id"]
    for query, said in {
        "step=1&limit=x": "limit='x'",
        "step=-1": "step='-1'",
        "step=9999999999999": "whole number",
        "step=40&show=drop": "not one of all",
        "step=40&sort=score;": "not one of order",
        "step=40&search=" + "x" * 201: "201 characters",
        "step=%F0%9F%98%80": "whole number",
    }.items():
        status, body, _ = ask(url, f"/api/runs/{run}/samples/train?{query}")
        assert status == 400 and said in body["error"], (query, body)
    assert ask(url, f"/api/runs/{run}/samples/train?step=40&limit=100000")[0] == 200


def test_it_only_reads(url: str) -> None:
    run = runs(url)["one"]["id"]
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/api/runs", f"/api/runs/{run}/config", "/static/main.js"):
            assert ask(url, path, method)[0] == 405, (method, path)


def test_a_browser_is_told_to_run_nothing(url: str) -> None:
    for path in ("/", "/static/main.js", "/api/runs", "/api/nothing"):
        _, _, headers = ask(url, path)
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "unsafe" not in policy
            and headers["x-content-type-options"] == "nosniff"
        )
    _, page, _ = ask(url, "/")
    assert (
        page.count(b"<script") == 1
        and b'src="/static/main.js"' in page
        and b" on" not in page.replace(b" only", b"")
    )


def test_texts_of_a_model_are_only_ever_data(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    run = write_run(tmp_path / "<img src=x onerror=alert(3)>")
    write_step(run, "train", 41, [answer(evil, prompt=evil, truth=evil, extras={evil: evil})])
    with serving(tmp_path) as url:
        (found,) = runs(url).values()
        status, group, headers = ask(url, f"/api/runs/{found['id']}/samples/train/41/0")
        assert status == 200 and headers["content-type"] == "application/json"
        assert group["prompt"]["text"] == evil == group["samples"][0]["response"]["text"]
        assert group["samples"][0]["reported"] == {evil: evil}


def test_another_site_cannot_read_it_through_a_name_of_its_own(url: str) -> None:
    assert ask(url, "/api/runs", Host="evil.example:8700")[0] == 421
    assert ask(url, "/api/runs", Host="127.0.0.1.evil.example")[0] == 421
    assert ask(url, "/api/runs", Host="localhost:9999")[0] == 200
    assert ask(url, "/api/runs", Host="[::1]:9999")[0] == 200


def test_a_token_guards_everything(root: Path) -> None:
    with serving(root, token=TOKEN) as url:
        for path in ("/", "/api/runs", "/static/main.js", "/?token=wrong", f"/api/runs?token={TOKEN}"):
            status, body, _ = ask(url, path)
            assert status == 401 and b"token" in body, path
        assert ask(url, "/api/runs", Authorization="Bearer wrong")[0] == 401
        assert ask(url, "/api/runs", Authorization=f"Bearer {TOKEN}", Host="gpu7:8700")[0] == 200
        status, _, headers = ask(url, f"/?token={TOKEN}")
        cookie = headers["set-cookie"]
        assert (
            status == 303
            and headers["location"] == "/"
            and "HttpOnly" in cookie
            and "samesite=strict" in cookie.lower()
        )
        assert ask(url, "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        assert ask(url, "/api/runs", Cookie="strop_board=%C3%A9")[0] == 401


def test_a_door_to_other_machines_needs_a_token() -> None:
    assert (
        checked_token(None, "127.0.0.1") is None
        and checked_token(None, "::1") is None
        and checked_token(TOKEN, "0.0.0.0")
    )
    for host in ("0.0.0.0", "::", "gpu7", "10.0.0.1"):
        with pytest.raises(ValueError, match="needs a token"):
            checked_token(None, host)
    for token in ("short", "with space in the middle", "€" * 20):
        with pytest.raises(ValueError, match="16 or more"):
            checked_token(token, "0.0.0.0")


def test_the_command_says_what_is_wrong(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="There is no folder"):
        main([str(tmp_path / "nothing")])
    with pytest.raises(ValueError, match="cannot be used"):
        main([str(tmp_path), "--port", str(urlsplit(url).port)])


def test_a_run_with_damaged_files_is_shown_with_what_is_wrong(tmp_path: Path) -> None:
    run = write_run(tmp_path / "hurt")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\xff garbage\n" + line(41, **metrics(41)).encode())
    (run / "metrics.config.json").write_text('{"trainer": ')
    (run / "alerts.jsonl").write_text('{"step": 1}\nbroken\n')
    (run / "global_step_40" / "manifest.json").write_text("{")
    (run / "global_step_20" / "actor" / "model.safetensors").write_bytes(b"x")
    (run / "workers").mkdir()
    (run / "workers" / "rank_0.json").write_text("{")
    write_run(tmp_path / "well")
    with serving(tmp_path) as url:
        found = runs(url)
        assert found["well"]["damaged"] == []
        assert len(found["hurt"]["damaged"]) == 2 and found["hurt"]["step"] == 41
        at = f"/api/runs/{found['hurt']['id']}"
        assert "metrics.config.json cannot be read" in ask(url, f"{at}/config")[1]["damaged"][0]
        (run / "samples" / "train_000040.parquet").write_bytes(b"PAR1")
        assert "train_000040.parquet is damaged" in ask(url, f"{at}/samples/train?step=40")[1]["damaged"][0]
        status, body, _ = ask(url, f"{at}/samples/train/40/0")
        assert status == 500 and "train_000040.parquet is damaged" in body["error"]
        assert ask(url, f"{at}/alerts")[1] == {"alerts": [{"step": 1}], "damaged": 1}
        problems = [checkpoint["problem"] for checkpoint in ask(url, f"{at}/checkpoints")[1]["checkpoints"]]
        assert "manifest.json cannot be read" in problems[0] and "was cut or changed" in problems[1]
        assert not any(str(tmp_path) in problem for problem in problems)


HEARTBEAT = {"rank": 0, "world": 1, "host": "h", "pid": 1, "step": 1, "phase": "gen", "since": 1.0}


@pytest.mark.parametrize(
    "heartbeat",
    ["[" * 100_000, json.dumps({**HEARTBEAT, "phase": None}), json.dumps({**HEARTBEAT, "rank": "x"}), None],
    ids=["deep", "no phase", "no rank", "pipe"],
)
def test_a_heartbeat_that_no_worker_wrote_hides_no_run(tmp_path: Path, heartbeat: str | None) -> None:
    run = write_run(tmp_path / "hurt")
    (run / "workers").mkdir()
    (run / "workers" / "rank_1.json").write_text(json.dumps({**HEARTBEAT, "rank": 1}))
    if heartbeat is None:
        os.mkfifo(run / "workers" / "rank_0.json")
        os.mkfifo(run / "notes.json")
    else:
        (run / "workers" / "rank_0.json").write_text(heartbeat)
    write_run(tmp_path / "well")
    with serving(tmp_path) as url:
        assert {name: found["step"] for name, found in runs(url).items()} == {"hurt": 40, "well": 40}


def test_a_pipe_in_a_checkpoint_holds_no_reader(tmp_path: Path) -> None:
    (write_run(tmp_path / "run") / "global_step_90").mkdir()
    os.mkfifo(tmp_path / "run" / "global_step_90" / "manifest.json")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / "latest_checkpointed_iteration.txt")
    with serving(tmp_path) as url:
        status, found, _ = ask(url, f"/api/runs/{runs(url)['run']['id']}/checkpoints")
    assert status == 200 and found["checkpoints"][0]["problem"] == "global_step_90/manifest.json is no file."


@pytest.mark.parametrize("time", ["null", "Infinity", "1e999", '"yesterday"'])
def test_a_run_without_times_does_not_count_as_running(tmp_path: Path, time: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"step": 1, "time": {time}, "data": {{}}}}\n')
    with serving(tmp_path) as url:
        found = runs(url)["run"]
    # Pages compute with both: they take a number or null, and no text such as "NaN".
    assert (found["state"], found["started"], found["updated"]) == ("stopped", None, None)


def test_a_folder_without_runs_and_runs_that_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr("strop.board.run_index.FRESH", 0.0)
    monkeypatch.setattr("strop.board.app.FRESH", 0.0)
    with serving(tmp_path) as url:
        assert runs(url) == {}
        write_run(tmp_path / "new")
        (found,) = runs(url).values()
        shutil.rmtree(tmp_path / "new")
        assert runs(url) == {} and ask(url, f"/api/runs/{found['id']}/config")[0] == 404


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(outside)
    sly = root / "sly"
    sly.mkdir()
    (sly / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    with serving(root) as url:
        status, body, _ = ask(url, "/api/runs")
        assert status == 200 and [run["name"] for run in body["runs"]] == ["sly"]
        assert body["runs"][0]["step"] is None and "is a link" in body["runs"][0]["damaged"][0]


def test_the_board_needs_no_torch() -> None:
    code = "import sys, strop.board.serve, strop.board.describe; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_with_odd_characters(tmp_path: Path) -> None:
    for name in ("ünïcode run", "a%2e%2e", "quote'\"", "line\nbreak"):
        write_run(tmp_path / name)
    with serving(tmp_path) as url:
        found = runs(url)
        assert len({run["id"] for run in found.values()}) == 4
        for run in found.values():
            assert ask(url, f"/api/runs/{quote(run['id'])}/config")[0] == 200


def test_how_a_run_stands_by_what_its_workers_last_said(tmp_path: Path) -> None:
    for name, phases in {
        "well": ["gen", "reward"],
        "over": ["finished"] * 2,
        "bad": ["finished", "failed in gen"],
    }.items():
        write_run(tmp_path / name, steps=3)
        for rank, phase in enumerate(phases):
            (tmp_path / name / "workers").mkdir(exist_ok=True)
            Heartbeat(tmp_path / name, rank, 2).beat(3, phase)
    (tmp_path / "well" / "recorded" / "step_2" / "global_step_1").mkdir(parents=True)
    with serving(tmp_path) as url:
        assert {name: (run["state"], run["phase"]) for name, run in runs(url).items()} == {
            "well": ("running", "gen"),
            "over": ("finished", None),
            "bad": ("failed", None),
        }


def test_a_copy_of_a_run_that_was_killed_does_not_run(tmp_path: Path) -> None:
    """A copy has new times of its files. Its lock is as young as they are; that of a run is older than what
    its workers last wrote."""
    now = time.time()
    for name, since, age_of_lock in (("copied", now - 7200, 0.0), ("live", now - 7200, 9000.0)):
        (tmp_path / name / "workers").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "time": since, "data": {}}) + "\n"
        )
        (tmp_path / name / "workers" / "rank_0.json").write_text(json.dumps({**HEARTBEAT, "since": since}))
        lock_file(tmp_path / name).touch()
        os.utime(lock_file(tmp_path / name), (now - age_of_lock,) * 2)
    with serving(tmp_path) as url:
        states = {name: run["state"] for name, run in runs(url).items()}
    assert states == {"copied": "stopped", "live": "running"}


def test_a_run_of_this_machine_whose_processes_are_gone_is_stopped_soon(tmp_path: Path) -> None:
    """Not at once: the processes of a container are not found by their ids, but they give signs of life."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, now = socket.gethostname(), time.time()
    for name, host, pid, silence in (
        ("killed", here, ended.pid, 300.0),
        ("container", here, ended.pid, 90.0),
        ("alive", here, os.getpid(), 300.0),
        ("elsewhere", "node7", ended.pid, 300.0),
    ):
        (tmp_path / name / "workers").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "data": {}}\n')
        file = tmp_path / name / "workers" / "rank_0.json"
        file.write_text(json.dumps({**HEARTBEAT, "host": host, "pid": pid, "since": now}))
        os.utime(file, (now - silence,) * 2)
    with serving(tmp_path) as url:
        states = {name: run["state"] for name, run in runs(url).items()}
    assert states == {"killed": "stopped", "container": "running", "alive": "running", "elsewhere": "running"}


def test_a_long_phase_is_not_taken_for_the_end_of_a_run(tmp_path: Path) -> None:
    for name in ("long", "killed"):
        (tmp_path / name / "workers").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "data": {}}\n')
        file = tmp_path / name / "workers" / "rank_0.json"
        file.write_text(json.dumps(HEARTBEAT))
        os.utime(file, (1.0, 1.0))
    Heartbeat(tmp_path / "long").touch()
    with serving(tmp_path) as url:
        states = {name: (run["state"], run["phase"]) for name, run in runs(url).items()}
    assert states == {"long": ("running", "gen"), "killed": ("stopped", None)}


ROUTES = [
    "/api/runs",
    "/api/curves",
    "/api/runs/{a}/metrics",
    "/api/runs/{a}/config",
    "/api/runs/{a}/alerts",
    "/api/runs/{a}/checkpoints",
    "/api/runs/{a}/samples",
    "/api/runs/{a}/samples/{b}",
    "/api/runs/{a}/samples/{b}/{c}/{d}",
    "/api/runs/{a}/samples/{b}/{c}/{d}/{e}",
    "/{a}/{b}",
]
VALUES = [
    "one",
    "train",
    "-1",
    "9" * 5000,
    "NaN",
    "1e999",
    "%ED%A0%80",
    "%FF",
    "%00",
    "../..",
    "[" * 500,
    "a" * 3000,
    "",
]
KEYS = ["run", "metric", "points", "step", "split", "offset", "limit", "search", "sort", "from", "%FF", "a[]"]


def test_random_requests_are_answered_or_refused(url: str) -> None:
    """200 seeded requests: no answer is an error of the server, and each has a body that is UTF-8."""
    run = runs(url)["one"]["id"]
    for case in range(200):
        chance = random.Random(case)
        words = {letter: chance.choice(VALUES) for letter in "bcde"}
        path = chance.choice(ROUTES).format(a=chance.choice([*[run] * len(VALUES), *VALUES]), **words)
        query = "&".join(f"{chance.choice(KEYS)}={chance.choice(VALUES)}" for _ in range(chance.randrange(4)))
        status, _, _ = ask(url, f"{path}?{query}")
        assert status < 500, f"case {case}"


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("route", ["samples/train/{n}/0", "samples/train/0/{n}", "samples/train/history/{n}"])
def test_numbers_of_any_length_in_the_address(url: str, route: str, digits: int) -> None:
    run = runs(url)["one"]["id"]
    status, _, _ = ask(url, f"/api/runs/{run}/{route.format(n='9' * digits)}")
    assert 400 <= status < 500, status


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["trainer.async_training.enable=true"],
        ["actor_rollout_ref.rollout.over_sampling=1.5"],
        ["actor_rollout_ref.rollout.quantization=fp8"],
    ],
)
def test_the_arithmetic_is_that_of_the_run(settings: list[str]) -> None:
    loaded = load("ppo_trainer", settings)
    assert plan(loaded.tree()) == plan_ppo(loaded.config).table()


@pytest.mark.parametrize("size", ["Infinity", "NaN", "0", "9" * 400, "-1e308"])
def test_a_configuration_with_a_size_that_is_none_is_shown(tmp_path: Path, size: str) -> None:
    text = json.dumps(CONFIG).replace('"train_batch_size": 8', f'"train_batch_size": {size}')
    assert size in text
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.config.json").write_text(text)
    with serving(tmp_path) as url:
        status, found, _ = ask(url, f"/api/runs/{runs(url)['run']['id']}/config")
    assert status == 200 and found["values"]["data.train_files"] == "data/train.parquet"


def test_names_that_are_no_text_are_answered(tmp_path: Path) -> None:
    folder = tmp_path / "run-\udcff"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "data": {"loss\\ud800": 1.0}}\n')
    with serving(tmp_path) as url:
        (run,) = ask(url, "/api/runs")[1]["runs"]
        for what in ("metrics", "checkpoints"):
            assert ask(url, f"/api/runs/{run['id']}/{what}")[0] == 200
