"""A programming task: what to write, a reference, and how to draw the arguments of a call.

A family is a function `family(draw) -> Task` that chooses parameters. `build` adds a twist to some tasks (a
last step such as "in reverse order"), so that a family has many instances.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

Draw = random.Random
Family = Callable[[Draw], "Task"]
FAMILIES: dict[str, tuple[str, bool, Family]] = {}
"""Name: (topic, held out, family)."""

WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "lemon",
    "ocean",
    "piano",
    "robot",
    "sugar",
    "table",
    "uncle",
    "violin",
    "water",
    "yellow",
    "zebra",
    "bread",
    "chair",
    "dream",
    "eagle",
    "flame",
    "grape",
    "house",
    "island",
    "jelly",
    "knife",
    "light",
    "mango",
    "night",
    "onion",
    "paper",
    "queen",
    "rabbit",
    "snow",
    "train",
    "under",
    "voice",
    "wheel",
    "bee",
    "ant",
    "cat",
    "dog",
    "sun",
    "sky",
    "ice",
    "oak",
    "elm",
    "fig",
    "map",
    "net",
    "owl",
    "pen",
    "rug",
    "tea",
]


@dataclass(frozen=True)
class Task:
    signature: str
    """Name and parameters: `shift(text)`."""
    text: str
    """What the function returns, as a sentence that begins with "returns"."""
    solve: Callable[..., object]
    """The reference."""
    arguments: Callable[[Draw], list[object]]
    """Draws the arguments of one call."""
    family: str = ""
    topic: str = ""

    @property
    def function(self) -> str:
        return self.signature.partition("(")[0]

    def call(self, arguments: list[object]) -> object:
        """The reference's value; the arguments stay as they are."""
        return self.solve(*copy.deepcopy(arguments))


def family(topic: str, *, held_out: bool = False) -> Callable[[Family], Family]:
    """Register a family; one that is held out is never trained on."""

    def register(function: Family) -> Family:
        FAMILIES[function.__name__] = (topic, held_out, function)
        return function

    return register


def words(draw: Draw, least: int = 0, most: int = 7) -> list[str]:
    return [draw.choice(WORDS) for _ in range(draw.randint(least, most))]


def numbers(draw: Draw, least: int = 0, most: int = 9, low: int = -20, high: int = 30) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(least, most))]


def sentence(draw: Draw) -> str:
    return " ".join(words(draw))


# --- Twists -------------------------------------------------------------------------------------------------

Twist = tuple[str, Callable[[object], object]]
MAX_TWISTS = 2


def _twists(value: object, draw: Draw) -> list[Twist]:
    """Last steps that fit a value of this type."""
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        factor = draw.randint(2, 5)
        modulus = draw.randint(7, 13)
        return [
            (f"Multiply the result by {factor} before you return it.", lambda v: v * factor),
            (f"Return the result modulo {modulus}.", lambda v: v % modulus),
            ("Return the result as a string of its decimal digits.", str),
        ]
    if isinstance(value, str):
        return [
            ("Return the result in upper case.", lambda v: v.upper()),
            ("Return the result reversed.", lambda v: v[::-1]),
        ]
    if isinstance(value, list):
        return [
            ("Return the resulting list in reverse order.", lambda v: v[::-1]),
            ("Of the resulting list, return only the elements at even indices.", lambda v: v[::2]),
            ("Return the result as a pair: the list, and its length.", lambda v: [v, len(v)]),
        ]
    if isinstance(value, dict):
        return [
            ("Instead of the dictionary, return the sorted list of its keys.", sorted),
            ("Instead of the dictionary, return the number of its entries.", len),
        ]
    return []


def build(name: str, draw: Draw, twisted: float = 0.5) -> Task:
    """An instance of a family. A share of the instances has a twist, the same share of those a second one."""
    topic, _, make = FAMILIES[name]
    task = replace(make(draw), family=name, topic=topic)
    for _ in range(MAX_TWISTS):
        found = _twists(task.call(task.arguments(draw)), draw)
        choices = [twist for twist in found if twist[0] not in task.text]
        if not choices or draw.random() >= twisted:
            break
        task = _with_twist(task, *draw.choice(choices))
    return task


def _with_twist(task: Task, text: str, step: Callable[[object], object]) -> Task:
    return replace(task, text=f"{task.text} {text}", solve=lambda *given: step(task.solve(*given)))
