"""python -m strop.trainer.main_merge [merge|test] --local_dir CHECKPOINT/actor --target_dir OUT: a folder for
transformers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from strop.errors import answer
from strop.shared.process_setup import prepare_process


def run(arguments: Sequence[str]) -> int:
    """Merge a checkpoint, or test one against a Hugging Face folder; returns the exit code."""
    words = list(arguments)
    verb = "merge"
    if words and words[0] in ("merge", "test"):
        verb = words.pop(0)
    try:
        options = _parser(verb).parse_args(words)
    except SystemExit as stop:
        return int(stop.code or 0)
    if verb == "test":
        return _test(options)
    return _merge(options)


def _merge(options: argparse.Namespace) -> int:
    from strop.run.merge.merge import merge
    from strop.run.merge.sources import CodeTrust

    made = merge(
        options.local_dir,
        options.target_dir,
        base=options.base,
        dtype=options.dtype,
        keep_lora=options.lora == "keep",
        lora_alpha=options.lora_alpha,
        ema=options.ema,
        trust=CodeTrust(options.trust_remote_code, options.external_lib),
    )
    what = "a peft adapter" if options.lora == "keep" else "a folder for transformers"
    sys.stdout.write(f"{made}: {what}\n")
    return 0


def _test(options: argparse.Namespace) -> int:
    from strop.run.merge.merge import compare_with_folder, final_weights, named_as_in_files
    from strop.run.merge.sources import CodeTrust, read_source

    source = read_source(
        options.local_dir,
        base=options.base,
        lora_alpha=options.lora_alpha,
        ema=options.ema,
        trust=CodeTrust(options.trust_remote_code, options.external_lib),
    )
    weights = named_as_in_files(source, final_weights(source))
    found = compare_with_folder(weights, options.test_hf_dir, atol=options.atol)
    if not found:
        sys.stdout.write(f"{found.compared} tensors agree with {options.test_hf_dir}.\n")
        return 0
    sys.stdout.write(
        "\n".join([f"{options.local_dir} is not the model in {options.test_hf_dir}:", *found.lines(), ""])
    )
    return 1


def _parser(verb: str) -> argparse.ArgumentParser:
    description = __doc__
    if verb == "test":
        description = "Compare a checkpoint with a Hugging Face folder."
    parser = argparse.ArgumentParser(
        prog=f"strop merge {verb}".removesuffix(" merge"), description=description
    )
    parser.add_argument(
        "--local_dir",
        required=True,
        help=".../global_step_N/actor (or critic ...), of Strop or verl (FSDP or Megatron)",
    )
    parser.add_argument(
        "--base", help="folder of the model the run began with; only needed where the checkpoint does not say"
    )
    parser.add_argument(
        "--lora_alpha",
        type=float,
        help="verl checkpoints with LoRA: its scale, where lora_adapter/ is missing",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="the average over time (trainer.enable_ema) instead of the last weights",
    )
    parser.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="run model code that the checkpoint or its base model brings; what the checkpoint says about "
        "this is ignored",
    )
    parser.add_argument(
        "--external_lib", help="modules to import first, comma separated; those that the run names are not"
    )
    parser.add_argument(
        "--backend",
        choices=["fsdp", "megatron"],
        default="fsdp",
        help="of verl checkpoints, whose files say it; Strop's own need none",
    )
    for flag in ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization"):
        parser.add_argument(flag, action="store_true", help="of verl; the checkpoint says it")
    if verb == "test":
        parser.add_argument("--test_hf_dir", required=True, help="Hugging Face folder to compare with")
        parser.add_argument("--atol", type=float, default=0.0, help="largest difference that counts as equal")
    else:
        parser.add_argument(
            "--target_dir", required=True, help="folder to write; it must not exist, or be empty"
        )
        parser.add_argument(
            "--dtype", help="precision of the written weights; default: that of the base model's config"
        )
        parser.add_argument(
            "--lora",
            choices=["merge", "keep"],
            default="merge",
            help="adapters: into the weights, or on their own",
        )
    return parser


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
