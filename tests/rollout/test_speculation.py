"""The parts of speculative decoding: what is guessed, remembered, kept, and when it is done."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.native.decode_rows import ERROR, LENGTH, RUNNING, STOP
from strop.rollout.native.sampler import SampledTokens
from strop.rollout.native.speculation.controller import Controller
from strop.rollout.native.speculation.memory import DraftMemory
from strop.rollout.native.speculation.propose import NO_TOKEN, propose
from strop.rollout.native.speculation.verify import judge, write

# --- propose ------------------------------------------------------------------------------------------------


def proposed(
    sequence: Sequence[int], line: Sequence[int] = (), count: int = 3, least: int = 1, most: int = 4
) -> list[int]:
    tokens = torch.tensor([[*sequence, 0, 0]])  # what is behind a sequence does not matter
    lines = torch.tensor([[*line, NO_TOKEN]], dtype=torch.int32)
    found = propose(tokens, torch.tensor([len(sequence)]), lines, count, min_match=least, max_match=most)
    drafts: list[int] = found[0].tolist()
    return drafts


def plainly_proposed(
    sequence: Sequence[int], line: Sequence[int], count: int, least: int, most: int
) -> list[int]:
    """The same by its definition."""

    def match(source: Sequence[int], end: int) -> int:
        size = 0
        while size < min(most, end + 1, len(sequence)) and source[end - size] == sequence[-1 - size]:
            size += 1
        return size

    places = [(match(line, end), 0, end) for end in range(len(line) - 1) if line[end + 1] >= 0]
    places += [(match(sequence, end), 1, end) for end in range(len(sequence) - 1)]
    size, own, end = max(places, default=(0, 0, 0))
    if size < least:
        return [NO_TOKEN] * count
    if own:
        again = sequence[end + 1 :]
        return [again[i % len(again)] for i in range(count)]
    following = [*line[end + 1 : end + 1 + count], *[NO_TOKEN] * count][:count]
    for i, token in enumerate(following):
        if token < 0:
            return [*following[:i], *[NO_TOKEN] * (count - i)]
    return following


def test_the_tokens_after_the_longest_match_are_proposed() -> None:
    assert proposed([1, 2, 3, 4, 9, 3, 5, 6, 7, 2, 3]) == [4, 9, 3]  # 2 3 before 3
    assert proposed([1, 2, 5, 8, 2]) == [5, 8, 2]
    assert proposed([1, 2, 5, 8, 2, 6, 7, 2]) == [6, 7, 2]  # the later of equal ones
    assert proposed([1, 2, 3]) == [NO_TOKEN] * 3
    assert proposed([4, 7, 7]) == [7, 7, 7]  # what repeats itself goes on repeating


def test_earlier_sequences_are_searched_too() -> None:
    assert proposed([1, 2, 3], [8, 2, 3, 4, 5, -1, 3, 9, -1]) == [4, 5, NO_TOKEN]
    assert proposed([1, 2, 3, 6, 3], [3, 5, -1]) == [6, 3, 6]  # equally long: the sequence itself
    assert proposed([1, 2, 3], [2, 3, -1, 4]) == [NO_TOKEN] * 3  # nothing follows in that sequence
    assert proposed([1, 2, 3], [3, 5], least=2) == [NO_TOKEN] * 3


def test_proposals_are_the_definition() -> None:
    draw = random.Random(0)
    for _ in range(200):
        sequence = [draw.randrange(4) for _ in range(draw.randint(1, 12))]
        line = [draw.randrange(-1, 4) for _ in range(draw.randint(0, 15))]
        shape = (draw.randint(1, 5), draw.randint(1, 3), draw.randint(3, 5))
        assert proposed(sequence, line, *shape) == plainly_proposed(sequence, line, *shape)


# --- memory -------------------------------------------------------------------------------------------------


def small_memory(max_bytes: int = 4096, max_tokens: int = 20) -> DraftMemory:
    return DraftMemory(max_bytes=max_bytes, max_tokens=max_tokens, context=2)


def line_of(memory: DraftMemory, prompt: list[int], request: int = 99, width: int = 100) -> list[int] | None:
    found = memory.find(request, prompt)
    return None if found is None else found.line(width).tolist()


def test_answers_are_found_by_their_prompt_in_the_next_epoch() -> None:
    memory = small_memory()
    memory.add(0, [1, 2, 3], [10, 11])
    memory.add(0, [1, 2, 3], [12])
    memory.add(1, [4], [13])
    assert line_of(memory, [1, 2, 3]) == [2, 3, 10, 11, -1, 2, 3, 12, -1]
    assert line_of(memory, [4], 98) == [4, 13, -1]
    assert line_of(memory, [1, 2], 97) is None


def test_two_requests_for_one_prompt_share_their_answers() -> None:
    """Both asked what is known before the first answer was there."""
    memory = small_memory()
    for request in (1, 2):
        assert memory.find(request, [5, 6, 7]) is None
    memory.add(1, [5, 6, 7], [1, 2])
    memory.add(2, [5, 6, 7], [3, 4, 5])
    known = memory.find(3, [5, 6, 7])
    assert known is not None and [answer.tolist() for answer in known.answers] == [[1, 2], [3, 4, 5]]
    assert memory.num_tokens == known.num_tokens == 5


def test_a_continued_answer_belongs_to_its_first_prompt_and_replaces_its_beginning() -> None:
    memory = small_memory()
    memory.add(0, [1, 2, 3], [10, 11])
    memory.add(1, [1, 2, 3, 10, 11], [20])
    assert line_of(memory, [1, 2, 3]) == [2, 3, 10, 11, 20, -1]
    assert line_of(memory, [1, 2, 3, 50], 98) == [2, 3, 10, 11, 20, -1]


def test_old_answers_and_old_prompts_are_forgotten() -> None:
    memory = small_memory(max_bytes=4 * 30, max_tokens=10)
    for i in range(4):
        memory.add(0, [1], [i] * 4)
    assert line_of(memory, [1]) == [1, 2, 2, 2, 2, -1, 1, 3, 3, 3, 3, -1]
    assert line_of(memory, [1], width=7) == [1, 1, 3, 3, 3, 3, -1]
    for i in range(5):
        memory.add(10 + i, [2, i], [7] * 8)
    assert memory.num_tokens <= 30
    assert line_of(memory, [1], 97) is None and line_of(memory, [2, 4], 98) is not None
    memory.add(0, [1], [5, 6])
    assert line_of(memory, [1], 96) == [1, 5, 6, -1]


# --- verify -------------------------------------------------------------------------------------------------


def judged(
    sampled: list[int],
    drafts: list[int],
    *,
    length: int = 2,
    limit: int = 20,
    known: Sequence[int] = (),
    invalid: int | None = None,
    state: int = RUNNING,
) -> tuple[list[int], int]:
    """Tokens of the row after the pass, and its state."""
    tokens = torch.zeros(1, 21, dtype=torch.int64)
    tokens[0, :2] = 50
    tokens[0, length : length + len(known)] = torch.tensor(list(known), dtype=torch.int64)
    fields: dict[str, Tensor] = {
        "tokens": tokens,
        "log_probs": torch.zeros(1, 21),
        "length": torch.tensor([length]),
        "num_known": torch.tensor([length + len(known)]),
        "limit": torch.tensor([limit]),
        "state": torch.tensor([state]),
        "stops": torch.tensor([[9, -1]]),
    }
    valid = torch.ones(len(sampled), dtype=torch.bool)
    if invalid is not None:
        valid[invalid] = False
    drawn = SampledTokens(torch.tensor(sampled), -torch.tensor(sampled).float(), valid)
    rows = torch.tensor([0])
    found = judge(fields, rows, torch.tensor([drafts]), drawn)
    write(fields, rows, found, drawn.log_probs)
    end = int(fields["length"])
    new: list[int] = fields["tokens"][0, length:end].tolist()
    sampled_from = length + len(known)
    given = fields["log_probs"][0, sampled_from:end].tolist()
    assert given == [-float(token) for token in new[len(known) :]]
    return new, int(fields["state"])


@pytest.mark.parametrize(
    "sampled, drafts, more, expected",
    [
        ([1, 2, 3, 4], [1, 2, 3], {}, ([1, 2, 3, 4], RUNNING)),
        ([1, 2, 3, 4], [1, 7, 3], {}, ([1, 2], RUNNING)),
        ([1, 2, 3, 4], [7, 2, 3], {}, ([1], RUNNING)),
        ([1, 2, 3, 4], [-1, -1, -1], {}, ([1], RUNNING)),
        ([1, 9, 3, 4], [1, 9, 3], {}, ([1, 9], STOP)),
        ([9, 2, 3, 4], [1, 2, 3], {}, ([9], STOP)),
        ([1, 2, 3, 4], [1, 2, 3], {"limit": 4}, ([1, 2], LENGTH)),
        ([1, 2, 3, 9], [1, 2, 3], {"limit": 6}, ([1, 2, 3, 9], STOP)),
        ([1, 2, 3, 4], [1, 2, 3], {"invalid": 2}, ([1, 2], ERROR)),
        ([1, 2, 3, 4], [1, 7, 3], {"invalid": 3}, ([1, 2], RUNNING)),
        ([1, 2, 3, 4], [1, 2, 3], {"state": STOP}, ([], STOP)),
        ([1, 2, 3, 4], [5, 9, -1], {"known": [5, 9]}, ([5, 9, 3], RUNNING)),
        ([1, 2, 3, 4], [1, 2, 3], {"length": 18}, ([1, 2], LENGTH)),
    ],
)
def test_what_is_kept(
    sampled: list[int], drafts: list[int], more: dict[str, int], expected: tuple[list[int], int]
) -> None:
    assert judged(sampled, drafts, **more) == expected  # type: ignore[arg-type]


# --- controller ---------------------------------------------------------------------------------------------


def course(controller: Controller, rows: int, cost: float, kept: list[int], rounds: int) -> float:
    """The share of rounds with drafts, where a pass with drafts costs so much of an ordinary one."""
    with_drafts = 0
    for _ in range(rounds):
        drafts = controller.num_drafts(rows, known=True)
        controller.measured(rows, drafts, cost if drafts else 1.0)
        if drafts:
            with_drafts += 1
            controller.kept(True, kept[: drafts + 1])
    return with_drafts / rounds


@pytest.mark.parametrize(
    "rows, cost, kept, least, most",
    [
        (8, 1.1, [80, 70, 60, 50, 40], 0.95, 1.0),  # accepted: on
        (8, 1.1, [80, 4, 0, 0, 0], 0.0, 0.1),  # hardly accepted: off, and tried from time to time
        (8, 3.0, [80, 60, 40, 20, 10], 0.0, 0.1),  # accepted, but a pass costs three
        (65, 1.0, [80, 80, 80, 80, 80], 0.0, 0.0),  # too many rows: never
    ],
)
def test_drafts_are_made_where_they_pay(
    rows: int, cost: float, kept: list[int], least: float, most: float
) -> None:
    settings = SpeculationConfig(num_tokens=4, max_rows=64)
    share = course(Controller(settings, adaptive=True), rows, cost, kept, 200)
    assert least <= share <= most


def test_the_choice_changes_with_what_is_measured() -> None:
    controller = Controller(SpeculationConfig(num_tokens=4), adaptive=True)
    assert course(controller, 8, 1.1, [80, 4, 0, 0, 0], 100) < 0.1
    assert course(controller, 8, 1.1, [80, 70, 60, 50, 40], 800) > 0.5
    assert course(controller, 8, 1.1, [80, 4, 0, 0, 0], 400) < 0.3


def test_few_tokens_of_many_rows_and_always_where_it_is_asked_for() -> None:
    settings = SpeculationConfig(num_tokens=7, max_rows=64)
    adaptive = Controller(settings, adaptive=True)
    adaptive.measured(64, 0, 1.0)
    assert [adaptive.num_drafts(rows, known=True) for rows in (4, 32, 64)] == [7, 7, 3]
    always = Controller(settings, adaptive=False)
    assert [always.num_drafts(rows, known=False) for rows in (1, 64, 65)] == [7, 7, 0]


def test_known_prompts_are_drafted_at_once_and_at_length_where_nearly_all_is_kept() -> None:
    controller = Controller(SpeculationConfig(num_tokens=7, max_rows=64), adaptive=True)
    assert controller.num_drafts(8, known=False) == 0  # an ordinary pass is measured first
    assert controller.num_drafts(8, known=True) == 7
    assert controller.most_drafts == 15
    controller.measured(8, 7, 1.2)
    assert controller.num_drafts(8, known=True) == 0
    controller.measured(8, 0, 1.0)
    for _ in range(20):
        controller.kept(True, [80] * 8)
    assert controller.num_drafts(8, known=True) == 15
    assert controller.num_drafts(32, known=True) in (0, 7)  # 16 tokens of 32 rows are too many for a pass
    assert controller.num_drafts(8, known=False) in (0, 7)  # other rows have kept nothing yet
    for _ in range(40):
        controller.kept(True, [80, 40, 20, 10, 0, 0, 0, 0])
    assert controller.num_drafts(8, known=True) in (0, 7)
    assert Controller(SpeculationConfig(num_tokens=7), adaptive=False).most_drafts == 7
