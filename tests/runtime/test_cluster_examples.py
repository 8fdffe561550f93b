"""The examples for clusters are what the tools that read them expect."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from strop.config.commandline import parse
from strop.config.compose import load
from strop.config.rules import check

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


def settings_of(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:2] == ["strop", "ppo"]
    return words[2:]


def test_the_slurm_script_is_sound_and_its_settings_are_known():
    script = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "strop ppo" in line and not line.startswith("#"))
    command = line[line.index("strop ppo") :].replace('"$@"', "").replace("$address:$port", "10.0.0.1:20000")
    command = command.replace('"${#machines[@]}"', "2").replace('"$gpus"', "8")
    config = load("ppo_trainer", parse(settings_of(command)).overrides).config
    assert (config.trainer.runtime, config.trainer.nnodes, config.trainer.n_gpus_per_node) == ("ray", 2, 8)
    assert config.ray_kwargs.ray_init["address"] == "10.0.0.1:20000"


def told(program, *words):
    """The exit code and the output of a program in the environment of `make test-deploy`."""
    done = subprocess.run(
        [ROOT / ".venv-deploy" / "bin" / program, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.deploy
@pytest.mark.parametrize("script", ["examples/cluster/slurm.sbatch", ".ci/run"])
def test_shellcheck_has_nothing_to_say(script, tmp_path):
    assert told("shellcheck", script) == (0, "")
    (tmp_path / "bad.sh").write_text((ROOT / script).read_text() + "\nrm -r $unset/*\n")
    assert told("shellcheck", tmp_path / "bad.sh")[0] == 1


@pytest.mark.deploy
def test_hadolint_has_nothing_to_say(tmp_path):
    assert told("hadolint", "Dockerfile") == (0, "")
    text = (ROOT / "Dockerfile").read_text().replace("# hadolint ignore=DL3008\n", "")
    (tmp_path / "Dockerfile").write_text(text)
    code, said = told("hadolint", tmp_path / "Dockerfile")
    assert code == 1 and "DL3008" in said


@pytest.mark.deploy
def test_skypilot_accepts_its_file(tmp_path):
    """By SkyPilot's own parser of tasks, which checks every field."""
    code = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes, task.resources)"
    read, said = told("python", "-c", code, "examples/cluster/skypilot.yaml")
    assert read == 0 and "H100" in said, said
    bad = (ROOT / "examples/cluster/skypilot.yaml").read_text().replace("num_nodes", "nodes")
    (tmp_path / "bad.yaml").write_text(bad)
    read, said = told("python", "-c", code, tmp_path / "bad.yaml")
    assert read == 1 and "nodes" in said


def rayjob_errors(job):
    """What is wrong with a RayJob, by the fields and types of its definition."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = yaml.safe_load((Path(__file__).parent / "rayjob_schema.yaml").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = jsonschema.Draft202012Validator(schema).iter_errors(job)
    return sorted(f"{error.json_path}: {error.message}" for error in found)


def test_the_kubernetes_job_is_a_rayjob():
    assert rayjob_errors(yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("backoffLimit: 2", "backOffLimit: 2", "'backOffLimit' was unexpected"),
        ('num-cpus: "0"', "num-cpus: 0", "0 is not of type 'string'"),
        ("memory: 512Gi", "memory: 512GiB", "'512GiB' does not match"),
        ("maxReplicas: 2", "", "'maxReplicas' is a required property"),
        ("mountPath: /dev/shm", "path: /dev/shm", "'path' was unexpected"),
        ("medium: Memory", "medium: RAM", "'RAM' is not one of"),
        ("apiVersion: ray.io/v1", "apiVersion: ray.io/v1alpha1", "'ray.io/v1' was expected"),
    ],
)
def test_the_schema_of_a_rayjob_refuses_what_kubernetes_refuses(before, after, said):
    text = (CLUSTER / "kubernetes.yaml").read_text()
    assert before in text
    assert any(said in error for error in rayjob_errors(yaml.safe_load(text.replace(before, after))))


def test_the_kubernetes_job_runs_on_the_machines_that_it_asks_for():
    job = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    config = load("ppo_trainer", settings_of(job["spec"]["entrypoint"])).config
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == config.trainer.nnodes
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == 8


def test_ray_up_accepts_its_file():
    """By Ray's own schema."""
    ray = pytest.importorskip("ray")
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((CLUSTER / "ray_up.yaml").read_text()), schema)


def test_the_skypilot_job_composes_and_fits_its_machine():
    job = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert job.keys() == {"name", "resources", "num_nodes", "workdir", "file_mounts", "envs", "setup", "run"}
    for script in (job["setup"], job["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    command = job["run"].replace("\\\n", " ").replace("$MODEL", job["envs"]["MODEL"])
    loaded = load("ppo_trainer", settings_of(command))
    trainer = loaded.config.trainer
    assert job["resources"]["accelerators"].endswith(f":{trainer.n_gpus_per_node}")
    assert job["num_nodes"] == trainer.nnodes
    assert trainer.default_local_dir.startswith(next(iter(job["file_mounts"])))
    assert [str(finding) for finding in check(loaded) if finding.level == "error"] == []
