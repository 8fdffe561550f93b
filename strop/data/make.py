"""`strop data NAME --out DIR`: ready parquet files for reinforcement learning.

gsm8k, math, math500, aime and hh_rlhf are converted from files you have (or any fsspec address), yours from a plugin's
`@DATASETS.register(...)` too; arithmetic is made up on the spot.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.catalog import DATASETS
from strop.data.files import FORMATS, Rows, is_remote, open_rows
from strop.data.selection import permutation
from strop.registry import did_you_mean

Row = dict[str, Any]
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
HELD_OUT = 0.1
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def gsm8k(row: Row, split: str, index: int) -> Row:
    """Grade-school word problems; a row has question, and answer that ends in `#### 42`."""
    _, mark, final = row["answer"].rpartition("####")
    if not mark:
        raise ValueError("its answer has no '####' before the final number")
    return _row(
        "openai/gsm8k", row["question"], GSM8K_INSTRUCTION, final.strip().replace(",", ""), split, index, answer=row["answer"]
    )


def math(row: Row, split: str, index: int) -> Row:
    """Competition problems; a row has problem, and solution with a boxed answer."""
    return _row(
        "DigitalLearningGmbH/MATH-lighteval",
        row["problem"],
        MATH_INSTRUCTION,
        last_boxed(row["solution"]),
        split,
        index,
        answer=row["solution"],
    )


def math500(row: Row, split: str, index: int) -> Row:
    """MATH-500 and files like it; a row has problem and answer, and perhaps solution, subject and level."""
    solution = row.get("solution") or row["answer"]
    return _row("HuggingFaceH4/MATH-500", row["problem"], MATH_INSTRUCTION, row["answer"], split, index, answer=solution)


def aime(row: Row, split: str, index: int) -> Row:
    """AIME; a row has Problem and Answer (a whole number), and perhaps ID and Solution, as in Maxwell-Jia/AIME_2024."""
    answer = row["Answer"].strip()
    if not answer.isdecimal():
        raise ValueError(f"its Answer {answer!r} is no whole number")
    year = re.match(r"(\d{4})", str(row.get("ID") or ""))
    source = f"aime_{year[1]}" if year else "aime"
    return _row(source, row["Problem"], MATH_INSTRUCTION, str(int(answer)), split, index, answer=row.get("Solution") or answer)


def hh_rlhf(row: Row, split: str, index: int) -> Row:
    """Helpful and harmless dialogues; chosen and rejected are transcripts (or continuations of a prompt column).

    `chosen` and `rejected` come out as whole conversations for reward models and DPO, `prompt` is what both share.
    """
    prompt = row.get("prompt") or ""
    chosen, rejected = (transcript(prompt + row[key]) for key in ("chosen", "rejected"))
    if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant" or len(chosen) < 2:
        raise ValueError("chosen and rejected must be dialogues that end with the assistant")
    return {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": chosen[:-1],
        "chosen": chosen,
        "rejected": rejected,
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": chosen[-1]["content"]},
        "extra_info": {"split": split, "index": index},
    }


def arithmetic(
    size: int,
    test_size: int,
    *,
    digits: int = 2,
    largest: int | None = None,
    padded: bool = False,
    operators: str = "+",
    seed: int = 0,
) -> dict[str, list[Row]]:
    """Problems of two numbers from 0 to `largest` (or of up to `digits` digits), all different, as {train, test}.

    With `padded` all numbers are written with equally many digits (07+35=42), which tiny models learn much sooner.
    """
    for operator in operators:
        if operator not in OPERATORS:
            raise ValueError(f"--operators {operators!r}: {operator!r} is not one of {' '.join(OPERATORS)}.")
    operators = "".join(dict.fromkeys(operators))
    limit = 10**digits if largest is None else largest + 1
    space = limit * limit * len(operators)
    if size + test_size > space:
        raise ValueError(
            f"There are only {space} different problems of numbers up to {limit - 1} with {operators!r}, but "
            f"{size + test_size} are asked for. Lower --size and --test-size, or raise --digits or --largest."
        )
    made: dict[str, list[Row]] = {"train": [], "test": []}
    for number, code in enumerate(random.Random(seed).sample(range(space), size + test_size)):
        code, right = divmod(code, limit)
        which, left = divmod(code, limit)
        split = "train" if number < size else "test"
        width = len(str(limit - 1)) if padded else 0
        question = f"{left:0{width}d}{operators[which]}{right:0{width}d}="
        answer = f"{OPERATORS[operators[which]](left, right):0{width}d}"
        made[split].append(_row("arithmetic", question, "", answer, split, len(made[split]), answer=answer))
    return made


def published(name: str, rows: Rows) -> list[Row]:
    """Rows of a data set as it is published, each with what training and scoring need beside its own columns.

    Every row is kept, so a row that cannot be understood is an error.
    """
    made: list[Row] = []
    for index, row in enumerate(_published_rows(name, rows)):
        try:
            made.append({**rows[index], **DATASETS.get(name)(row, "test", index)})
        except ValueError as error:
            raise ValueError(f"{rows.where(index)} is no row of {name}: {error}.") from error
    return made


def last_boxed(text: str) -> str:
    """What the last \\boxed{...} of a solution holds.

    >>> last_boxed(r"so \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        short = re.findall(r"\\boxed\s+([^\s$]+)", text)
        if short:
            return short[-1]
        raise ValueError("its solution has no \\boxed{} answer")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start + len("\\boxed{") : place]
    raise ValueError("the braces of its \\boxed{} do not close")


def transcript(text: str) -> list[dict[str, str]]:
    """Messages of a dialogue written as `Human: ... Assistant: ...`, each turn on a paragraph of its own."""
    pieces = re.split(r"\n\n(Human|Assistant):", text if text.startswith("\n\n") else "\n\n" + text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[name], "content": said.strip()} for name, said in zip(pieces[1::2], pieces[2::2])]


def write(rows: Sequence[Row], file: Path) -> None:
    """Write parquet beside the target, then rename: nobody ever reads half a file."""
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), part)
    os.replace(part, file)


def convert(name: str, files: Sequence[str], *, size: int | None, test_size: int | None, seed: int) -> dict[str, list[Row]]:
    """Rows of local files as {train, test}. Files with test, valid or eval in their name are the test split; without one, a
    tenth of the rows is held out. Data sets that are there for testing only are not divided."""
    listed = _expand(files)
    if "train" not in DATASETS.entry(name).facts["splits"]:
        return {"test": _some(_converted(name, open_rows(listed, key="--from"), "test"), test_size, seed)}
    test_files = [file for file in listed if re.search("test|valid|eval", Path(file).stem.lower())]
    train_files = [file for file in listed if file not in test_files]
    if not train_files:
        raise ValueError(f"--from names only test files ({', '.join(test_files)}); name a training file too.")
    train = _converted(name, open_rows(train_files, key="--from"), "train")
    if test_files:
        test = _converted(name, open_rows(test_files, key="--from"), "test")
    else:
        order = permutation(len(train), seed=seed)
        cut = max(1, round(HELD_OUT * len(train)))
        train, test = [train[int(place)] for place in sorted(order[cut:])], [train[int(place)] for place in sorted(order[:cut])]
        for row in test:
            row["extra_info"]["split"] = "test"
    if not train:
        raise ValueError(f"{', '.join(train_files)}: no row is left to train on.")
    return {"train": _some(train, size, seed), "test": _some(test, test_size, seed)}


def main(argv: Sequence[str]) -> int:
    """The command; gives the exit code."""
    parser = _parser()
    try:
        asked = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    if asked.name == "arithmetic":
        size, test_size = asked.size or 5000, asked.test_size or 500
        made = arithmetic(
            size,
            test_size,
            digits=asked.digits,
            largest=asked.largest,
            padded=asked.padded,
            operators=asked.operators,
            seed=asked.seed,
        )
    elif asked.files:
        made = convert(asked.name, asked.files, size=asked.size, test_size=asked.test_size, seed=asked.seed)
    else:
        columns = " and ".join(DATASETS.entry(asked.name).facts["columns"])
        raise ValueError(
            f"strop data {asked.name} needs --from: parquet, json or jsonl files (or a folder of them) with {columns} columns."
        )
    out = Path(asked.out).expanduser()
    for split, rows in made.items():
        write(rows, out / f"{split}.parquet")
        sys.stdout.write(f"{out / split}.parquet: {len(rows)} rows\n")
    keys = {"train": "data.train_files", "test": "data.val_files"}
    sys.stdout.write("Use them: " + " ".join(f"{keys[split]}={out}/{split}.parquet" for split in made) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="strop data", description="Write parquet files, ready for training and testing.")
    parser.add_argument("name", choices=[*DATASETS.names(), "arithmetic"])
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument(
        "--from", dest="files", nargs="+", help="files to convert, or folders of them; local or fsspec addresses"
    )
    parser.add_argument("--size", type=_count, help="at most this many training rows, drawn at random (arithmetic: 5000)")
    parser.add_argument("--test-size", type=_count, help="at most this many test rows (arithmetic: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice")
    parser.add_argument("--digits", type=_count, default=2, help="arithmetic: most digits of a number")
    parser.add_argument("--largest", type=_count, help="arithmetic: largest number, instead of --digits")
    parser.add_argument("--padded", action="store_true", help="arithmetic: write 7 as 07 where numbers have two digits")
    parser.add_argument("--operators", default="+", help="arithmetic: any of + - *, together like +-")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _expand(files: Sequence[str]) -> list[str]:
    """Folders as the files of rows in them."""
    listed: list[str] = []
    for file in files:
        folder = Path(file).expanduser()
        if not is_remote(file) and folder.is_dir():
            listed += [str(inside) for inside in sorted(folder.iterdir()) if inside.suffix in FORMATS]
        else:
            listed.append(file)
    if not listed:
        raise ValueError(f"--from {' '.join(files)} holds no file that ends in {', '.join(FORMATS)}.")
    return listed


def _converted(name: str, rows: Rows, split: str) -> list[Row]:
    made, skipped = [], ""
    for index, row in enumerate(_published_rows(name, rows)):
        try:
            made.append(DATASETS.get(name)(row, split, index))
        except ValueError as error:
            skipped = skipped or f"{rows.where(index)}: {error}"
    if len(made) < len(rows):
        sys.stderr.write(f"strop: {len(rows) - len(made)} of {len(rows)} {split} rows left out; the first: {skipped}\n")
    return made


def _published_rows(name: str, rows: Rows) -> Iterator[Row]:
    """The rows, once it is sure that the columns of the data set are there and hold text; an answer may be a whole number."""
    columns = DATASETS.entry(name).facts["columns"]
    for file in rows.files:
        missing = [column for column in columns if column not in file.columns]
        if missing:
            raise ValueError(
                f"{file.address} has no column {missing[0]!r}, so it is not {name} as it is published."
                f"{did_you_mean(missing[0], file.columns)} Its columns: {', '.join(file.columns)}."
            )
    for index, row in enumerate(rows):
        row = {**row, **{key: str(row[key]) for key in columns if key.lower() == "answer" and isinstance(row.get(key), int)}}
        if not all(isinstance(row.get(column), str) for column in columns):
            raise ValueError(f"{rows.where(index)}: {' and '.join(columns)} must be text.")
        yield row


def _row(source: str, question: str, instruction: str, truth: str, split: str, index: int, *, answer: str) -> Row:
    content = f"{question} {instruction}" if instruction else question
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def _some(rows: list[Row], most: int | None, seed: int) -> list[Row]:
    if most is None or most >= len(rows):
        return rows
    return [rows[int(place)] for place in sorted(permutation(len(rows), seed=seed, stream=1)[:most])]
