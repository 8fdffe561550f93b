"""strop plan: memory and time of a run on devices that need not be here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from strop.config.commandline import parse
from strop.config.compose import load
from strop.config.rules import check
from strop.config.schema.ppo import PpoConfig
from strop.planning.advice import advise, alternatives
from strop.planning.devices import DEVICES, OTHER, PlannedCluster, device_of
from strop.planning.parallel_sizes import sized_runs
from strop.planning.report import as_text, as_values, sizes_text

ROOTS = {"ppo": "ppo_trainer", "sft": "sft_trainer", "rm": "rm_trainer", "dpo": "dpo_trainer"}
OPTIONS = ("--gpu", "--nodes", "--gpus-per-node")
DIVIDING = ("_parallel_size", "fsdp_size")
"""Endings of the keys that divide the devices. Other rules do not apply: a plan needs no data files."""
USAGE = (
    f"strop plan [{'|'.join(ROOTS)}] [my_run.yaml] [key=value ...] [--gpu {'|'.join(DEVICES)}|80GiB] "
    "[--nodes N] [--gpus-per-node M] [--json]"
)


HELP = f"""usage: {USAGE}

Memory and time of every phase of a step, computed on any machine. Devices and models need not be here.

  --gpu NAME          {", ".join(DEVICES)}, or the memory of another one, such as 80GiB; without it {OTHER}
  --nodes N           machines; without it trainer.nnodes
  --gpus-per-node M   GPUs of each machine; without it trainer.n_gpus_per_node
  --json              the plan for a program

Exit status 0: the run fits. 1: it does not, and the plan says what to set.

example: strop plan sft model.path=qwen2.5-7b --gpu 4090 --gpus-per-node 4

strop config show sft_trainer      every key of sft, its default and what it does (also ppo, rm, dpo)
strop config explain KEY           everything about one key
"""


def run(arguments: Sequence[str]) -> int:
    """0: it fits; 1: it does not, and the plan says what to set."""
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(HELP)
        return 0
    rest, given = _options(list(arguments))
    root = ROOTS["ppo"]
    if rest and rest[0] in ROOTS:
        root = ROOTS[rest.pop(0)]
    parsed = parse(rest, switches=("--json",))
    sizes = {"trainer.nnodes": "--nodes", "trainer.n_gpus_per_node": "--gpus-per-node"}
    devices: list[str] = []
    for key, option in sizes.items():
        if option in given:
            devices.append(f"{key}={_count(given, option)}")
    loaded = load(root, [*parsed.overrides, *devices], parsed.config, parsed.search)
    clashes: list[str] = []
    for finding in check(loaded):
        if finding.level == "error" and finding.key.endswith(DIVIDING):
            clashes.append(f"  {finding}")
    if clashes:
        raise ValueError("\n".join(["The devices cannot be divided like this:", *clashes]))
    config = loaded.config
    trainer = config.trainer
    cluster = PlannedCluster(device_of(given.get("--gpu", OTHER)), trainer.nnodes, trainer.n_gpus_per_node)
    advice = advise(config, cluster)
    turned = alternatives(config, cluster)
    if "--json" in parsed.switches:
        sys.stdout.write(json.dumps(as_values(advice, turned), indent=2) + "\n")
    else:
        sys.stdout.write(as_text(advice, turned))
        if isinstance(config, PpoConfig) and config.actor_rollout_ref.actor.strategy == "megatron":
            sys.stdout.write(sizes_text(sized_runs(config, cluster)))
    return 0 if advice.fits else 1


def _options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The planner's own options out of a command line; `--gpu h100` and `--gpu=h100` are the same."""
    rest: list[str] = []
    given: dict[str, str] = {}
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in OPTIONS:
            rest.append(word)
            continue
        if not equals and not words:
            raise ValueError(f"{name} needs a value. Expected: {USAGE}")
        if not equals:
            value = words.pop(0)
        given[name] = value
    return rest, given


def _count(given: dict[str, str], name: str) -> int:
    if not given[name].isdigit() or int(given[name]) < 1:
        raise ValueError(f"{name} {given[name]}: give a number of at least 1.")
    return int(given[name])
