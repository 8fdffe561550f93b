"""strop <verb>: compose a configuration and call the program of the verb. Heavy libraries are imported when a
program needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from strop import __version__
from strop.errors import answer
from strop.registry import did_you_mean

VERBS = {
    "ppo": "ppo_trainer",
    "sft": "sft_trainer",
    "rm": "rm_trainer",
    "dpo": "dpo_trainer",
    "generate": "generation",
    "eval": "evaluation",
    "serve-rm": "reward_server",
    "serve-train": "training_service",
}

CHOOSES_KEYS = "[FILE.yaml] [--config-name NAME] [--config-path DIR] [--config-dir DIR] [key=value ...]"

HELP = f"""strop {__version__}: reinforcement-learning post-training for language models

usage: strop VERB [--config-name NAME] [--config-path DIR] [--config-dir DIR] [key=value ...]

train
  ppo           PPO, GRPO, RLOO, REINFORCE++, ReMax ...: the same as python -m strop.trainer.main_ppo
  sft           supervised fine-tuning: strop sft model.path=DIR data.train_files=FILE
  rm            a reward model from pairs of responses
  dpo           direct preference optimization from pairs of responses
  quickstart    a tiny model learns arithmetic on this machine, in minutes (--algorithm ppo|rloo|...)
  openrlhf      run an OpenRLHF command: strop openrlhf train_ppo --pretrain ... --reward_pretrain ...
use
  generate      responses for a file of prompts:
                strop generate model.path=DIR data.path=IN data.output_path=OUT.parquet
  eval          scores for a file of responses:
                strop eval data.path=OUT.parquet | strop eval --compare A.parquet B.parquet
  merge         a checkpoint (of Strop or verl) as a Hugging Face folder:
                strop merge --local_dir .../actor --target_dir OUT
  serve-rm      a reward model behind HTTP, in OpenRLHF's protocol:
                strop serve-rm model.path=RM server.port=5000
  serve-train   training and sampling for many users over HTTP, in the protocol of the Tinker client:
                strop serve-train model.path=DIR server.port=8900
inspect
  board         a web page of runs (curves, samples token by token, configurations, health):
                strop board DIR [--port 8700]
  profile       time per phase of a step, and which setting to change first: strop profile RUN
  doctor        the phase of every process of a run, and how long it has lasted: strop doctor RUN
  replay        compute a recorded step again and show the first difference: strop replay RUN --step K
prepare
  check         check a configuration without a GPU: strop check ppo key=value ... [--json]
  plan          estimate memory and time on any devices:
                strop plan key=value ... --gpu h100 --gpus-per-node 8 (strop plan --help: other GPUs)
  config        strop config show NAME [key=value ...] | explain KEY | docs --out docs
  convert       strop convert openrlhf -- COMMAND ... | strop convert verl --to openrlhf key=value ...
                | strop convert trl SCRIPT.py
  data          write ready-made data sets:
                strop data gsm8k|math|math500|aime|geo3k|hh_rlhf|arithmetic --out DIR [--from FILES]

Keys are verl's; `strop config explain KEY` explains one. STROP_DEBUG=1 shows tracebacks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    from strop.shared.process_setup import prepare_process

    prepare_process()
    if "" not in sys.path and not sys.flags.safe_path:
        # `python -m` finds modules of the current folder, an installed program does not. Behind libraries,
        # so that a file of the user's hides none of them.
        sys.path.append("")
    return answer(lambda: dispatch(arguments))


def dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    verb, *rest = arguments
    if verb in ("--version", "version"):
        print(f"strop {__version__}")
        return 0
    if verb not in PROGRAMS:
        raise ValueError(
            f"There is no verb {verb!r}.{did_you_mean(verb, PROGRAMS)} `strop --help` lists them."
        )
    asked = rest[:1] in (["-h"], ["--help"]) or (verb == "check" and {"-h", "--help"} & set(rest))
    if asked and verb not in HAVE_OPTIONS:
        print(help_of(verb, rest[0]))
        return 0
    return PROGRAMS[verb](rest)


def help_of(verb: str, subject: str = "") -> str:
    """The line of HELP about the verb, and where its keys are explained. `subject`: the verb to check."""
    lines = HELP.splitlines()
    [first] = [place for place, line in enumerate(lines) if line.startswith(f"  {verb} ")]
    about = lines[first].strip()
    if lines[first + 1].startswith(" " * 16):  # the example stands on a line of its own
        about += "\n" + lines[first + 1]
    usage = ""
    if verb in VERBS:
        usage = f"usage: strop {verb} {CHOOSES_KEYS}\n"
    if verb == "check":
        checked = subject if subject in VERBS else "|".join(VERBS)
        usage = f"usage: strop check {checked} {CHOOSES_KEYS} [--json]\n"
    show = f"strop config show {VERBS.get(subject, VERBS.get(verb, 'ppo_trainer'))}"
    explain = "strop config explain KEY"
    return (
        f"{about}\n{usage}\n{show:<34} every key, its default and what it does\n"
        f"{explain:<34} everything about one key"
    )


def ppo(arguments: list[str]) -> int:
    from strop.trainer.main_ppo import run

    return run(arguments)


def generate(arguments: list[str]) -> int:
    from strop.trainer.main_generation import run

    return run(arguments)


def evaluate(arguments: list[str]) -> int:
    from strop.trainer.main_eval import run

    return run(arguments)


def sft(arguments: list[str]) -> int:
    from strop.trainer.main_sft import run

    return run(arguments)


def rm(arguments: list[str]) -> int:
    from strop.trainer.main_rm import run

    return run(arguments)


def dpo(arguments: list[str]) -> int:
    from strop.trainer.main_dpo import run

    return run(arguments)


def merge(arguments: list[str]) -> int:
    from strop.trainer.main_merge import run

    return run(arguments)


def serve_rm(arguments: list[str]) -> int:
    from strop.trainer.main_serve_rm import run

    return run(arguments)


def serve_train(arguments: list[str]) -> int:
    from strop.trainer.main_serve_train import run

    return run(arguments)


def board(arguments: list[str]) -> int:
    from strop.board.serve import main as serve_board

    return serve_board(arguments)


def check(arguments: list[str]) -> int:
    from strop.preflight.examine import main as preflight

    if not arguments or arguments[0] not in VERBS:
        raise ValueError(
            f"Expected: strop check {'|'.join(VERBS)} [key=value ...] [--json], got "
            f"{' '.join(arguments) or 'nothing'}."
        )
    return preflight(VERBS[arguments[0]], arguments[1:])


def plan(arguments: list[str]) -> int:
    from strop.trainer.main_plan import run

    return run(arguments)


def config(arguments: list[str]) -> int:
    from strop.config.commandline import parse
    from strop.config.compose import load
    from strop.config.explain import explain, show
    from strop.config.reference_pages import write_pages
    from strop.config.schema import ROOTS

    match arguments:
        case ["show", name, *rest]:
            root = VERBS.get(name, name)
            if root not in ROOTS:
                raise ValueError(
                    f"There is no configuration {name!r}.{did_you_mean(name, ROOTS)} There are "
                    f"{', '.join(ROOTS)}."
                )
            options = parse(rest)
            print(show(root, load(root, options.overrides, options.config, options.search).tree()), end="")
        case ["explain", key]:
            print(explain(key), end="")
        case ["docs", "--out", folder]:
            print(f"{len(write_pages(Path(folder)))} pages below {folder}")
        case _:
            raise ValueError(
                "Expected: strop config show NAME [key=value ...] | explain KEY | docs --out docs."
            )
    return 0


def convert(arguments: list[str]) -> int:
    match arguments:
        case ["openrlhf", "--", *command] | ["openrlhf", *command] if command:
            from strop.config.openrlhf.convert import convert as from_openrlhf

            print(from_openrlhf(command).render(), end="")
        case ["trl", "--", *words] | ["trl", *words] if words:
            from strop.config.trl.convert import convert_trl

            print(convert_trl(words).render(), end="")
        case ["verl", "--to", "openrlhf", *rest]:
            from strop.config.commandline import parse
            from strop.config.compose import load
            from strop.config.openrlhf.reverse import convert_to_openrlhf

            options = parse(rest)
            loaded = load("ppo_trainer", options.overrides, options.config, options.search)
            print(convert_to_openrlhf(loaded, load("ppo_trainer").tree()).render(), end="")
        case _:
            raise ValueError(
                "Expected: strop convert openrlhf -- COMMAND ... | strop convert verl --to openrlhf "
                "key=value ... | strop convert trl SCRIPT.py | strop convert trl -- grpo --learning_rate ..."
            )
    return 0


def openrlhf(arguments: list[str]) -> int:
    from strop.config.openrlhf.convert import convert as from_openrlhf

    conversion = from_openrlhf(arguments)
    print(conversion.render(), file=sys.stderr)
    if conversion.verb not in PROGRAMS:
        raise ValueError(
            f"`strop {conversion.verb}` cannot run yet; `strop check {conversion.verb} ...` examines the "
            "configuration."
        )
    code = PROGRAMS[conversion.verb](conversion.arguments())
    folders = [found.value for found in conversion.overrides if found.key == "trainer.default_local_dir"]
    if code == 0 and conversion.final_model and folders:
        from strop.run.checkpoint.final_model import place_final_model

        role = "actor" if conversion.verb == "ppo" else "model"
        target = Path(conversion.final_model).expanduser()
        if place_final_model(Path(folders[0]).expanduser(), role, target):
            print(f"The final model is in {target}.", file=sys.stderr)
    return code


def profile(arguments: list[str]) -> int:
    from strop.run.profile.report import main as run_profile

    return run_profile(arguments)


def doctor(arguments: list[str]) -> int:
    from strop.run.doctor import main as run_doctor

    return run_doctor(arguments)


def replay(arguments: list[str]) -> int:
    from strop.replay.replay import main as run_replay

    return run_replay(arguments)


def data(arguments: list[str]) -> int:
    from strop.data.make import main as make

    return make(arguments)


def quickstart(arguments: list[str]) -> int:
    from strop.quickstart.quickstart import main as start

    return start(arguments)


PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    "ppo": ppo,
    "sft": sft,
    "rm": rm,
    "dpo": dpo,
    "generate": generate,
    "eval": evaluate,
    "merge": merge,
    "serve-rm": serve_rm,
    "serve-train": serve_train,
    "board": board,
    "check": check,
    "plan": plan,
    "config": config,
    "convert": convert,
    "openrlhf": openrlhf,
    "data": data,
    "quickstart": quickstart,
    "profile": profile,
    "doctor": doctor,
    "replay": replay,
}

HAVE_OPTIONS = ("quickstart", "data", "board", "merge", "plan", "profile", "doctor", "replay")
"""Verbs that explain themselves with --help; settings of the others are key=value."""

if __name__ == "__main__":
    sys.exit(main())
