"""`strop data NAME --out DIR`: write parquet files for training.

Published sets and those of plugins (`@DATASETS.register`) are converted; arithmetic is generated.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from strop.catalog import DATASETS
from strop.data.fetch import FORMATS, is_remote
from strop.data.files import FileRows, Row, open_rows
from strop.data.selection import permutation
from strop.registry import did_you_mean

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
HELD_OUT = 0.1  # share of the rows for testing, if there is no test file
ROLES = {"Human": "user", "Assistant": "assistant"}
ARITHMETIC_ROWS = 5000
ARITHMETIC_TEST_ROWS = 500
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def gsm8k(row: Row, split: str, index: int) -> Row:
    """Grade-school word problems; a row has question, and answer that ends in `#### 42`."""
    _, mark, final = row["answer"].rpartition("####")
    if not mark:
        raise ValueError("its answer has no '####' before the final number")
    return _row(
        "openai/gsm8k",
        row["question"],
        GSM8K_INSTRUCTION,
        final.strip().replace(",", ""),
        split,
        index,
        answer=row["answer"],
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
    return _row(
        "HuggingFaceH4/MATH-500",
        row["problem"],
        MATH_INSTRUCTION,
        row["answer"],
        split,
        index,
        answer=row.get("solution") or row["answer"],
    )


def aime(row: Row, split: str, index: int) -> Row:
    """AIME; a row has Problem and Answer (an integer), and perhaps ID and Solution, as in
    Maxwell-Jia/AIME_2024."""
    answer = row["Answer"].strip()
    if not answer.isdecimal():
        raise ValueError(f"its Answer {answer!r} is no whole number")
    year = re.match(r"(\d{4})", str(row.get("ID") or ""))
    source = "aime"
    if year:
        source = f"aime_{year[1]}"
    return _row(
        source,
        row["Problem"],
        MATH_INSTRUCTION,
        str(int(answer)),
        split,
        index,
        answer=row.get("Solution") or answer,
    )


def hh_rlhf(row: Row, split: str, index: int) -> Row:
    """Helpful and harmless dialogues; chosen and rejected are transcripts, or continuations of a prompt
    column.

    `chosen` and `rejected` become whole conversations for reward models and DPO; `prompt` is their common
    part.
    """
    prompt = row.get("prompt") or ""
    chosen = transcript(prompt + row["chosen"])
    rejected = transcript(prompt + row["rejected"])
    ends = [dialogue[-1]["role"] for dialogue in (chosen, rejected) if len(dialogue) > 1]
    if ends != ["assistant", "assistant"]:
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
    """Return different problems of two numbers from 0 to `largest` (or of up to `digits` digits): {train,
    test}.

    With `padded`, all numbers have the same number of digits (07+35=42), which tiny models learn much faster.
    """
    for operator in operators:
        if operator not in OPERATORS:
            raise ValueError(f"--operators {operators!r}: {operator!r} is not one of {' '.join(OPERATORS)}.")
    operators = "".join(dict.fromkeys(operators))
    limit = 10**digits
    if largest is not None:
        limit = largest + 1
    width = len(str(limit - 1)) if padded else 0
    space = limit * limit * len(operators)
    if space > sys.maxsize:
        raise ValueError("--digits or --largest: numbers so large cannot be drawn. Set at most 9 digits.")
    if size + test_size > space:
        raise ValueError(
            f"There are only {space} different problems of numbers up to {limit - 1} with {operators!r}, but "
            f"{size + test_size} are asked for. Lower --size and --test-size, or raise --digits or --largest."
        )
    splits: dict[str, list[Row]] = {"train": [], "test": []}
    for number, code in enumerate(random.Random(seed).sample(range(space), size + test_size)):
        code, right = divmod(code, limit)
        operator_index, left = divmod(code, limit)
        operator = operators[operator_index]
        split = "train"
        if number >= size:
            split = "test"
        question = f"{left:0{width}d}{operator}{right:0{width}d}="
        answer = f"{OPERATORS[operator](left, right):0{width}d}"
        rows = splits[split]
        rows.append(_row("arithmetic", question, "", answer, split, len(rows), answer=answer))
    return splits


def published_rows(name: str, rows: FileRows) -> list[Row]:
    """Return the rows of a published data set, each with the columns for training and scoring added.

    Every row is kept, so a row that cannot be converted is an error.
    """
    convert_row = _converter(name)
    result: list[Row] = []
    for index, row in enumerate(_checked_rows(name, rows)):
        try:
            result.append({**rows[index], **convert_row(row, "test", index)})
        except ValueError as error:
            raise ValueError(f"{rows.where(index)} is no row of {name}: {error}.") from error
    return result


def last_boxed(text: str) -> str:
    """Return the content of the last \\boxed{...} of a solution.

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
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start + len("\\boxed{") : position]
    raise ValueError("the braces of its \\boxed{} do not close")


def transcript(text: str) -> list[dict[str, str]]:
    """Return the messages of a dialogue `Human: ... Assistant: ...` with one paragraph per turn."""
    if not text.startswith("\n\n"):
        text = "\n\n" + text
    pieces = re.split(r"\n\n(Human|Assistant):", text)
    messages = []
    for name, content in zip(pieces[1::2], pieces[2::2]):
        messages.append({"role": ROLES[name], "content": content.strip()})
    return messages


def write(rows: Sequence[Row], file: Path) -> None:
    """Write a parquet file; it is written under another name first, so that no reader sees half a file."""
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), part)
    os.replace(part, file)


def convert(
    name: str, files: Sequence[str], *, size: int | None, test_size: int | None, seed: int
) -> dict[str, list[Row]]:
    """Return the converted rows of files as {train, test}.

    Files with test, valid or eval in their name are the test split; without one, a tenth of the rows is held
    out. Data sets that are for testing only are not divided.
    """
    listed = _expand(files)
    if "train" not in DATASETS.entry(name).facts["splits"]:
        rows = _converted(name, open_rows(listed, key="--from"), "test")
        return {"test": _sample(rows, test_size, seed)}
    test_files = [file for file in listed if re.search("test|valid|eval", Path(file).stem.lower())]
    train_files = [file for file in listed if file not in test_files]
    if not train_files:
        raise ValueError(f"--from names only test files ({', '.join(test_files)}); name a training file too.")
    train = _converted(name, open_rows(train_files, key="--from"), "train")
    if test_files:
        test = _converted(name, open_rows(test_files, key="--from"), "test")
    else:
        order = permutation(len(train), seed=seed)
        held_out = max(1, round(HELD_OUT * len(train)))
        test = [train[int(index)] for index in sorted(order[:held_out])]
        train = [train[int(index)] for index in sorted(order[held_out:])]
        for row in test:
            row["extra_info"]["split"] = "test"
    if not train:
        raise ValueError(f"{', '.join(train_files)}: no row is left to train on.")
    return {"train": _sample(train, size, seed), "test": _sample(test, test_size, seed)}


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    try:
        args = parser.parse_args(list(argv))
    except SystemExit as stop:
        return int(stop.code or 0)
    out = Path(args.out).expanduser()
    if out.is_file():
        raise ValueError(f"--out {args.out} is a file; name a folder.")
    keys = {"train": "data.train_files", "test": "data.val_files"}
    overrides = []
    for split, rows in _build_splits(args).items():
        write(rows, out / f"{split}.parquet")
        sys.stdout.write(f"{out / split}.parquet: {len(rows)} rows\n")
        overrides.append(f"{keys[split]}={out}/{split}.parquet")
    sys.stdout.write(f"Use them: {' '.join(overrides)}\n")
    return 0


def _build_splits(args: argparse.Namespace) -> dict[str, list[Row]]:
    if args.name == "arithmetic":
        return arithmetic(
            args.size or ARITHMETIC_ROWS,
            args.test_size or ARITHMETIC_TEST_ROWS,
            digits=args.digits,
            largest=args.largest,
            padded=args.padded,
            operators=args.operators,
            seed=args.seed,
        )
    if args.files:
        return convert(args.name, args.files, size=args.size, test_size=args.test_size, seed=args.seed)
    columns = " and ".join(DATASETS.entry(args.name).facts["columns"])
    raise ValueError(
        f"strop data {args.name} needs --from: parquet, json or jsonl files (or a folder of them) with "
        f"{columns} columns."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="strop data", description="Write parquet files, ready for training and testing."
    )
    parser.add_argument("name", choices=[*DATASETS.names(), "arithmetic"])
    parser.add_argument("--out", required=True, help="folder to write to")
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        help="files to convert, or folders of them; local or fsspec addresses",
    )
    parser.add_argument(
        "--size", type=count, help="at most this many training rows, drawn at random (arithmetic: 5000)"
    )
    parser.add_argument("--test-size", type=count, help="at most this many test rows (arithmetic: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of every random choice")
    parser.add_argument("--digits", type=count, default=2, help="arithmetic: most digits of a number")
    parser.add_argument("--largest", type=count, help="arithmetic: largest number, instead of --digits")
    parser.add_argument(
        "--padded", action="store_true", help="arithmetic: write 7 as 07 where numbers have two digits"
    )
    parser.add_argument("--operators", default="+", help="arithmetic: any of + - *, together like +-")
    return parser


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _expand(files: Sequence[str]) -> list[str]:
    """Replace folders by the files of rows in them."""
    listed: list[str] = []
    for file in files:
        folder = Path(file).expanduser()
        if not is_remote(file) and folder.is_dir():
            listed += [str(path) for path in sorted(folder.iterdir()) if path.suffix in FORMATS]
        else:
            listed.append(file)
    if not listed:
        raise ValueError(f"--from {' '.join(files)} holds no file that ends in {', '.join(FORMATS)}.")
    return listed


def _converted(name: str, rows: FileRows, split: str) -> list[Row]:
    convert_row = _converter(name)
    converted: list[Row] = []
    first_problem = ""
    for index, row in enumerate(_checked_rows(name, rows)):
        try:
            converted.append(convert_row(row, split, index))
        except ValueError as error:
            first_problem = first_problem or f"{rows.where(index)}: {error}"
    skipped = len(rows) - len(converted)
    if skipped:
        sys.stderr.write(
            f"strop: {skipped} of {len(rows)} {split} rows left out; the first: {first_problem}\n"
        )
    return converted


def _converter(name: str) -> Callable[[Row, str, int], Row]:
    """Return the function (row, split, index) -> row of a data set."""
    convert_row: Callable[[Row, str, int], Row] = DATASETS.get(name)
    return convert_row


def _checked_rows(name: str, rows: FileRows) -> Iterator[Row]:
    """Yield the rows after checking that the data set's columns exist and hold text; an answer may be an
    integer."""
    columns = DATASETS.entry(name).facts["columns"]
    for file in rows.files:
        missing = [column for column in columns if column not in file.columns]
        if missing:
            raise ValueError(
                f"{file.address} has no column {missing[0]!r}, so it is not {name} as it is published."
                f"{did_you_mean(missing[0], file.columns)} Its columns: {', '.join(file.columns)}."
            )
    for index, row in enumerate(rows):
        row = dict(row)
        for column in columns:
            if column.lower() == "answer" and isinstance(row.get(column), int):
                row[column] = str(row[column])
        if not all(isinstance(row.get(column), str) for column in columns):
            raise ValueError(f"{rows.where(index)}: {' and '.join(columns)} must be text.")
        yield row


def _row(
    source: str, question: str, instruction: str, truth: str, split: str, index: int, *, answer: str
) -> Row:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{question} {instruction}".rstrip()}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def _sample(rows: list[Row], limit: int | None, seed: int) -> list[Row]:
    """Return at most `limit` random rows, in their order."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[int(index)] for index in sorted(permutation(len(rows), seed=seed, stream=1)[:limit])]
