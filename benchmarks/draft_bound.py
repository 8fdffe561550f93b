"""How many tokens per pass drafts can give: drafters on recorded answers, and the bound of the model itself.

    python benchmarks/draft_bound.py sample --model MODEL --questions train.jsonl --out answers.jsonl
    python benchmarks/draft_bound.py bound answers.jsonl

`sample` draws answers to questions with the native engine at temperature 1, with their log-probs. The first
half of the answers to a prompt is the first epoch, the second half the second. With --ranks it also records
the rank of each token in the model's distribution, which the bound of an ideal drafter needs.

`bound` decodes the second epoch again on paper. A draft without a distribution is kept exactly if it is the
token that was sampled, so recorded tokens are enough. It prints, as JSON lines, acceptance by length of the
match, tokens per pass by drafter and number of drafts, what a drafter could reach that knew the model's most
likely tokens, and the speedup for passes that cost `--cost` ordinary steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_MATCH = 8
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


@dataclass(frozen=True)
class Answer:
    """An answer of the second epoch with what is known before it: a prompt and earlier answers."""

    prompt: list[int]
    tokens: list[int]
    chances: list[float]
    """Of its tokens. Their mean is the chance that two draws at one place agree."""
    ranks: list[int]
    earlier: list[list[int]]


# --- answers ------------------------------------------------------------------------------------------------


def sample(arguments: argparse.Namespace) -> None:
    from strop.models.load import load_config, load_language_model, load_tokenizer, resolve
    from strop.rollout.base import Request, Sampling
    from strop.rollout.native.engine import NativeEngine

    source = resolve(arguments.model)
    dtype = getattr(torch, arguments.dtype)
    model = load_language_model(source, load_config(source), dtype=dtype).to(arguments.device).eval()
    tokenizer = load_tokenizer(arguments.model)
    engine = NativeEngine(model, max_model_len=2048, max_num_seqs=256)
    lines = Path(arguments.questions).read_text(encoding="utf-8").splitlines()
    stops = tuple({tokenizer.eos_token_id, *_end_of_turn(tokenizer)})
    prompts = []
    for line in lines[arguments.first : arguments.first + arguments.prompts]:
        text = f"{json.loads(line)['question']} {INSTRUCTION}"
        message = [{"role": "user", "content": text}]
        prompts.append(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    requests = [Request(prompt, n=arguments.samples, seed=place) for place, prompt in enumerate(prompts)]
    start = time.perf_counter()
    groups = engine.generate(requests, Sampling(max_tokens=arguments.tokens, stop_ids=stops))
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1)}), flush=True)
    engine.sleep()
    with Path(arguments.out).open("a", encoding="utf-8") as out:
        for prompt, group in zip(prompts, groups, strict=True):
            record = {"prompt": prompt, "answers": [answer.ids for answer in group]}
            record["log_probs"] = [[round(x, 4) for x in answer.log_probs] for answer in group]
            if arguments.ranks:
                record["ranks"] = [ranks_of(model, prompt, answer.ids) for answer in group]
            out.write(json.dumps(record) + "\n")
            out.flush()


def _end_of_turn(tokenizer: object) -> list[int]:
    found = tokenizer.convert_tokens_to_ids("<|im_end|>")  # type: ignore[attr-defined]
    return [found] if isinstance(found, int) else []


@torch.no_grad()
def ranks_of(model: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> list[int]:
    """The place of each token in the model's distribution, 0: the most likely one."""
    row = torch.tensor([[*prompt, *ids]], device=next(model.parameters()).device)
    logits = model(input_ids=row, logits_to_keep=len(ids) + 1).logits[0, :-1].float()
    chosen = logits.gather(1, torch.tensor(ids, device=row.device)[:, None])
    return (logits > chosen).sum(-1).tolist()


def read(paths: Sequence[str]) -> list[Answer]:
    found = []
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            count = len(record["answers"])
            ranks = record.get("ranks", [[]] * count)
            for i in range(count // 2, count):
                earlier = record["answers"][: count // 2]
                chances = [math.exp(x) for x in record["log_probs"][i]]
                found.append(Answer(record["prompt"], record["answers"][i], chances, ranks[i], earlier))
    return found


# --- drafters -----------------------------------------------------------------------------------------------


class Places:
    """Where n-grams of a prompt, earlier answers and the answer so far end."""

    def __init__(self, answer: Answer) -> None:
        self.sequences = [[*answer.prompt[-MAX_MATCH:], *earlier] for earlier in answer.earlier]
        self.own = list(answer.prompt)
        self.sequences.append(self.own)
        self._index: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        for number, sequence in enumerate(self.sequences):
            for end in range(1, len(sequence)):
                self._add(number, end)

    def _add(self, number: int, end: int) -> None:
        """The n-grams before `end`, a place that has a token."""
        for size in range(1, min(MAX_MATCH, end) + 1):
            self._index[tuple(self.sequences[number][end - size : end])].append((number, end))

    def append(self, token: int) -> None:
        self.own.append(token)
        self._add(len(self.sequences) - 1, len(self.own) - 1)

    def longest(self, context: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
        """The length of the longest match with the end of `context`, and the places after it."""
        for size in range(min(MAX_MATCH, len(context)), 0, -1):
            places = self._index.get(tuple(context[-size:]))
            if places:
                return size, places
        return 0, []

    def following(self, context: Sequence[int]) -> tuple[int, Counter[int]]:
        size, places = self.longest(context)
        return size, Counter(self.sequences[number][end] for number, end in places)


Tree = dict[int, "Tree"]


def latest(places: Places, drafts: int) -> tuple[int, Tree]:
    """What the engine does: the tokens after the latest of the longest matches, the answer itself last."""
    size, found = places.longest(places.own)
    if not found:
        return 0, {}
    number, end = found[-1]
    chain = places.sequences[number][end : end + drafts]
    if number == len(places.sequences) - 1:
        period = len(places.own) - end
        chain = [places.own[end + i % period] for i in range(drafts)]
    return size, _chain(chain)


def frequent(places: Places, drafts: int) -> tuple[int, Tree]:
    """Each token is the most frequent one after the longest match with the tokens before it."""
    context = list(places.own)
    first = 0
    chain: list[int] = []
    while len(chain) < drafts:
        size, counts = places.following(context)
        if not counts:
            break
        first = first or size
        chain.append(counts.most_common(1)[0][0])
        context.append(chain[-1])
    return first, _chain(chain)


def tree(places: Places, drafts: int) -> tuple[int, Tree]:
    """A tree of so many tokens, grown where its path is most likely by the counts of matches."""
    root: Tree = {}
    first, counts = places.following(places.own)
    frontier: list[tuple[float, Tree, list[int], int]] = []

    def widen(node: Tree, path: list[int], chance: float) -> None:
        size, after = places.following([*places.own[-MAX_MATCH:], *path])
        total = sum(after.values()) + 0.5
        frontier.extend((chance * count / total, node, path, token) for token, count in after.items() if size)

    widen(root, [], 1.0)
    for _ in range(drafts):
        if not frontier:
            break
        best = max(frontier, key=lambda entry: entry[0])
        frontier.remove(best)
        chance, node, path, token = best
        node[token] = {}
        widen(node[token], [*path, token], chance)
    return first if counts else 0, root


def _chain(tokens: Sequence[int]) -> Tree:
    root: Tree = {}
    node = root
    for token in tokens:
        node[token] = {}
        node = node[token]
    return root


DRAFTERS: dict[str, Callable[[Places, int], tuple[int, Tree]]] = {
    "latest": latest,
    "frequent": frequent,
    "tree": tree,
}


# --- decoding on paper --------------------------------------------------------------------------------------


@dataclass
class Outcome:
    passes: int = 0
    tokens: int = 0
    by_match: dict[int, list[int]] | None = None
    """By length of the match: first drafts, and those that were kept."""


def decode(
    answer: Answer, drafter: Callable[[Places, int], tuple[int, Tree]], drafts: int, found: Outcome
) -> None:
    places = Places(answer)
    place = 0
    while place < len(answer.tokens):
        size, node = drafter(places, drafts)
        kept = 0
        while place + kept < len(answer.tokens) and answer.tokens[place + kept] in node:
            node = node[answer.tokens[place + kept]]
            kept += 1
        if found.by_match is not None:
            tried = found.by_match.setdefault(size, [0, 0])
            tried[0] += 1
            tried[1] += kept > 0
        gained = min(kept + 1, len(answer.tokens) - place)
        for token in answer.tokens[place : place + gained]:
            places.append(token)
        place += gained
        found.passes += 1
        found.tokens += gained


def ideal(answers: Sequence[Answer], width: int, depth: int) -> float:
    """Tokens per pass of a drafter that knows the `width` most likely tokens at each place of the path."""
    passes = 0
    tokens = 0
    for answer in answers:
        place = 0
        while place < len(answer.tokens):
            gained = 1
            while (
                gained <= depth
                and place + gained <= len(answer.tokens) - 1
                and answer.ranks[place + gained - 1] < width
            ):
                gained += 1
            place += gained
            tokens += gained
            passes += 1
    return tokens / passes


def bound(arguments: argparse.Namespace) -> None:
    answers = read(arguments.answers)
    lengths = [len(answer.tokens) for answer in answers]
    chances = [chance for answer in answers for chance in answer.chances]
    ranks = [rank for answer in answers for rank in answer.ranks]
    line: dict[str, object] = {"answers": len(answers), "mean_tokens": round(sum(lengths) / len(lengths), 1)}
    line["two_draws_agree"] = round(sum(chances) / len(chances), 3)
    if ranks:
        line["most_likely"] = round(sum(rank == 0 for rank in ranks) / len(ranks), 3)
        line["two_most_likely"] = round(sum(rank < 2 for rank in ranks) / len(ranks), 3)
    print(json.dumps(line))
    for name, drafter in DRAFTERS.items():
        for drafts in arguments.drafts:
            found = Outcome(by_match={} if drafts == arguments.drafts[0] else None)
            for answer in answers:
                decode(answer, drafter, drafts, found)
            rate = found.tokens / found.passes
            line = {"drafter": name, "drafts": drafts, "tokens_per_pass": round(rate, 3)}
            line |= {"speedup": {str(cost): round(rate / cost, 2) for cost in arguments.cost}}
            print(json.dumps(line))
            if found.by_match is not None:
                rates = {size: [n, round(kept / n, 3)] for size, (n, kept) in sorted(found.by_match.items())}
                print(json.dumps({"drafter": name, "first_draft_kept_by_match": rates}))
    for width in (1, 2, 4) if ranks else ():
        for depth in arguments.drafts:
            rate = ideal(answers, width, depth)
            print(json.dumps({"ideal_width": width, "depth": depth, "tokens_per_pass": round(rate, 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    draw = verbs.add_parser("sample")
    draw.add_argument("--model", required=True)
    draw.add_argument("--questions", required=True, help="JSON lines with a question each")
    draw.add_argument("--out", required=True)
    draw.add_argument("--prompts", type=int, default=8)
    draw.add_argument("--first", type=int, default=0, help="go on with this prompt")
    draw.add_argument("--samples", type=int, default=16, help="of both epochs")
    draw.add_argument("--tokens", type=int, default=256)
    draw.add_argument("--dtype", default="bfloat16")
    draw.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    draw.add_argument("--ranks", action="store_true", help="also compute the rank of each token")
    draw.set_defaults(run=sample)
    judge = verbs.add_parser("bound")
    judge.add_argument("answers", nargs="+")
    judge.add_argument("--drafts", type=int, nargs="+", default=[3, 7, 15])
    judge.add_argument("--cost", type=float, nargs="+", default=[1.0, 1.1, 1.25])
    judge.set_defaults(run=bound)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
