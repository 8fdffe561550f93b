"""The public surface as text: `python -m strop.api.surface > docs/api.md`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator

import strop
from strop.config.short_keys import SHORT_FORMS

INTRODUCTION = """# Python API

`make docs` generates this page from the docstrings; a test checks that it is current. Only the names on this
page are public. Everything else may change without notice.

```python
import strop

rows = [{"prompt": "What is 2+3?", "answer": "5"}, ...]


def reward(completion, answer, **row):
    return float(completion.strip().endswith(answer))


run = strop.grpo("Qwen/Qwen2.5-0.5B-Instruct", train=rows, reward=reward, max_response_length=512, steps=100)
run.metrics["critic/score/mean"]  # run.plot() draws it, run.samples() shows responses
run.save("out")  # a folder that transformers loads; run.model and run.tokenizer
print(run.command())  # the same run as a command line
```

A run from Python is the same as a run from the command line. Objects (rows, functions, a module) are written
to `inputs/` in the folder of the run, and the run reads them there. So checks, errors, checkpoints and
results are the same, and `run.command()` prints a command that starts the same run in another process. The
same call resumes an earlier run: after Ctrl-C in a notebook (which returns the run so far; a script gets
KeyboardInterrupt), after `stop`, or after an error in a callback.

Only one run can be active in a process, because runs share signal handlers, random states and library
patches. With `n_gpus_per_node` above 1, or Ray, the run uses separate processes. Then functions must be
importable or serializable as source code, and callbacks are rejected.

## Reward functions

The parameter names decide how a function is called:

| a parameter | form | called with |
|---|---|---|
| `completion` | plain | the text of one response, and the columns of its row by name |
| `completions` | TRL | lists: `prompts`, `completions`, `completion_ids`, and every column |
| `solution_str` | verl | `data_source`, `solution_str`, `ground_truth`, `extra_info` |
| `solution_strs` | verl, batches | lists: `data_sources`, `solution_strs`, `ground_truths`, `extra_infos` |

A function receives the arguments that it names, or all of them if it takes `**row`. It must have exactly one
of these names. A function may be async. It returns a number, or a dict with `score` and further numbers,
which become metrics; a batch function returns a list of them. `None`, NaN, a wrong length and an exception
are errors: the first row is tested before the run starts, and a sample without a score is masked and counted.
The same forms work in the file of `custom_reward_function.path` (TRL's form with
`reward_model.reward_manager=batch`). Each call from Python imports such a file again if it, or a module that
it imports, was edited. Modules that your own code or the body of a function imports are not imported again.

With TRL's form, completions are texts if the prompt of the row is a text, and lists of one message if it is
a list of messages. The scores of several functions are added with `reward_weights`; one of several functions
may return None for a sample that it does not apply to.

## Callbacks

"""


def reference() -> str:
    """The page."""
    lines = [INTRODUCTION.rstrip(), ""]
    for name, meaning in CALLBACKS.items():
        lines.append(f"- {meaning.format(name=name)}")
    lines += ["", "## Short forms of keys", ""]
    lines += [
        'You can pass any key by its full name in a dict (`**{"trainer.save_freq": 10}`), by the end of'
    ]
    lines += ["its name (`max_response_length`), or by one of these:", "", "| short | key |", "|---|---|"]
    for short, key in SHORT_FORMS["ppo_trainer"].items():
        lines.append(f"| `{short}` | `{key}` |")
    lines += ["", "## Functions and classes"]
    for name in public_names():
        lines += ["", *_entry(name, public_object(name))]
    return "\n".join(lines) + "\n"


CALLBACKS = {
    "on_step(step, metrics)": "`{name}` is called after each step (and after a validation before the first).",
    "on_samples(step, samples)": "`{name}` gets the samples of a step: rows of input, output, score, split.",
    "stop(step, metrics)": "`{name}` ends the run, with a checkpoint, when it returns a true value.",
}


def public_names() -> list[str]:
    """The public functions, then the classes."""
    names = [name for name in strop.__all__ if not name.startswith("_")]
    functions = [name for name in names if inspect.isfunction(public_object(name))]
    return functions + [name for name in names if name not in functions]


def public_object(name: str) -> object:
    """A public function or class, from the module that defines it: `strop.ppo` may be the package."""
    homes = {public: home for home, names in vars(strop)["_HOMES"].items() for public in names}
    return getattr(importlib.import_module(homes[name]), name)


def _entry(name: str, value: object) -> list[str]:
    if inspect.isfunction(value):
        return [f"### strop.{name}", "", "```python", signature_text(name, value), "```", "", *_doc(value)]
    assert isinstance(value, type)
    lines = [f"### strop.{name}", "", *_doc(value), ""]
    if not dataclasses.is_dataclass(value) and "__init__" in vars(value):
        made = signature_text(name, vars(value)["__init__"], method=True)
        lines += ["```python", made.removeprefix("def ").removesuffix(" -> None"), "```", ""]
    for member, about in members(value):
        lines.append(f"- `{member}`: {about}")
    return lines


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Public attributes and methods of a class, with the first sentence of their documentation."""
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, first_sentence(value.fget)
        elif inspect.isfunction(value):
            shown = signature_text(name, value, method=True).replace("\n", " ").replace("    ", "")
            yield shown.removeprefix("def ").replace("( ", "(").replace(", )", ")"), first_sentence(value)
    if dataclasses.is_dataclass(kind):
        from strop.config.schema.reflect import field_docs

        for name, about in field_docs(kind).items():
            yield name, about


def first_sentence(value: object) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def signature_text(name: str, function: Callable[..., object], *, method: bool = False) -> str:
    """`def name(...)` with one parameter per line."""
    lines = []
    starred = False
    signature = inspect.signature(function)
    for parameter in list(signature.parameters.values())[int(method) :]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            lines.append("*")
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        text = f"{_stars(parameter)}{parameter.name}: {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        lines.append(text)
    body = "".join(f"    {line},\n" for line in lines)
    opening = "(\n" if body else "("
    return f"def {name}{opening}{body}) -> {signature.return_annotation}"


def _stars(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_KEYWORD:
        return "**"
    if parameter.kind is parameter.VAR_POSITIONAL:
        return "*"
    return ""


def _doc(value: object) -> list[str]:
    """The docstring; lines with deeper indentation stay with their paragraph."""
    return ["```text", *(inspect.getdoc(value) or "").splitlines(), "```"]


if __name__ == "__main__":
    sys.stdout.write(reference())
