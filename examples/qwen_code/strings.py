"""Families of tasks about text."""

from __future__ import annotations

from itertools import groupby

from task import Draw, Task, family, sentence, words

VOWELS = "aeiou"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _noise(draw: Draw, alphabet: str, least: int = 0, most: int = 14) -> str:
    return "".join(draw.choice(alphabet) for _ in range(draw.randint(least, most)))


@family("strings")
def shift_letters(draw: Draw) -> Task:
    by = draw.randint(1, 9)
    parity, name = draw.choice([(0, "even"), (1, "odd")])

    def solve(text: str) -> str:
        moved = []
        for index, letter in enumerate(text):
            if letter in LETTERS and index % 2 == parity:
                letter = LETTERS[(LETTERS.index(letter) + by) % 26]
            moved.append(letter)
        return "".join(moved)

    text = (
        f"returns `text` with every lowercase letter at an {name} index (counted from 0) moved {by} places "
        "forward in the alphabet, from z on to a again. All other characters stay."
    )
    return Task("shift_letters(text)", text, solve, lambda d: [sentence(d)])


@family("strings")
def compress_runs(draw: Draw) -> Task:
    least = draw.randint(2, 4)

    def solve(text: str) -> str:
        parts = []
        for letter, run in groupby(text):
            length = len(list(run))
            parts.append(f"{letter}{length}" if length >= least else letter * length)
        return "".join(parts)

    text = (
        f"returns `text` with each run of at least {least} equal characters replaced by the character and "
        "the length of the run. Shorter runs stay."
    )
    return Task("compress_runs(text)", text, solve, lambda d: [_runs(d)])


def _runs(draw: Draw) -> str:
    return "".join(draw.choice("abc") * draw.randint(1, 6) for _ in range(draw.randint(0, 6)))


@family("strings")
def mask_words(draw: Draw) -> Task:
    longer = draw.randint(3, 5)
    mark = draw.choice("*#-")

    def mask(word: str) -> str:
        return word[0] + mark * (len(word) - 2) + word[-1] if len(word) > longer else word

    text = (
        f"returns `text` with every word of more than {longer} letters masked: its first and last letter "
        f"stay, each letter between them becomes `{mark}`. Words are separated by single spaces."
    )
    return Task("mask_words(text)", text, lambda t: " ".join(map(mask, t.split())), lambda d: [sentence(d)])


@family("strings")
def reverse_some_words(draw: Draw) -> Task:
    limit = draw.randint(3, 5)
    long = draw.random() < 0.5
    which = f"at least {limit}" if long else f"fewer than {limit}"

    def solve(text: str) -> str:
        return " ".join(w[::-1] if (len(w) >= limit) == long else w for w in text.split())

    text = f"returns `text` with each word of {which} letters reversed; the order of the words stays."
    return Task("reverse_some_words(text)", text, solve, lambda d: [sentence(d)])


@family("strings")
def count_neighbours(draw: Draw) -> Task:
    kinds = {"vowels": VOWELS, "digits": "0123456789", "letters from a to f": "abcdef"}
    name = draw.choice(sorted(kinds))
    distance = draw.randint(1, 3)

    def solve(text: str) -> int:
        kind = kinds[name]
        return sum(text[i] in kind and text[i + distance] in kind for i in range(len(text) - distance))

    text = (
        f"returns the number of indices i for which the characters at i and at i + {distance} of `text` are "
        f"both {name}."
    )
    return Task("count_neighbours(text)", text, solve, lambda d: [_noise(d, "abcdefiou0123xyz")])


@family("strings")
def longest_block(draw: Draw) -> Task:
    kinds = draw.randint(1, 3)

    def solve(text: str) -> str:
        best = ""
        for start in range(len(text)):
            for end in range(start + 1, len(text) + 1):
                part = text[start:end]
                if len(set(part)) <= kinds and len(part) > len(best):
                    best = part
        return best

    text = (
        f"returns the longest substring of `text` with at most {kinds} different characters; of several "
        "equally long ones the first."
    )
    return Task("longest_block(text)", text, solve, lambda d: [_noise(d, "abcd", 0, 12)])


@family("strings")
def interleave(draw: Draw) -> Task:
    second = draw.random() < 0.5
    first, other = ("right", "left") if second else ("left", "right")

    def solve(left: str, right: str) -> str:
        a, b = (right, left) if second else (left, right)
        both = "".join(x + y for x, y in zip(a, b))
        return both + (a[len(b) :] or b[len(a) :])[::-1]

    text = (
        f"takes characters alternately from `{first}` and `{other}`, beginning with `{first}`, until one of "
        "them has none left, appends the rest of the longer one in reverse, and returns the text."
    )
    return Task(
        "interleave(left, right)", text, solve, lambda d: [_noise(d, "abcde", 0, 7), _noise(d, "vwxyz", 0, 7)]
    )


@family("strings")
def word_score(draw: Draw) -> Task:
    bonus = draw.randint(2, 9)
    letter = draw.choice(VOWELS)

    def solve(text: str) -> int:
        total = 0
        for place, word in enumerate(text.split(), start=1):
            total += place * len(word) + bonus * word.count(letter)
        return total

    text = (
        "returns the score of `text`: for each word, its length times its position (the first word has "
        f"position 1), plus {bonus} for every `{letter}` in it, summed over all words."
    )
    return Task("word_score(text)", text, solve, lambda d: [sentence(d)])


@family("strings")
def camel_case(draw: Draw) -> Task:
    mark = draw.choice("_-./")
    every = draw.randint(2, 3)

    def solve(name: str) -> str:
        parts = [part for part in name.split(mark) if part]
        return "".join(p.capitalize() if i % every == every - 1 else p for i, p in enumerate(parts))

    text = (
        f"splits `name` at `{mark}`, drops empty parts, capitalizes every "
        f"{'second' if every == 2 else 'third'} part and returns the parts joined without a separator. The "
        "other parts stay as they are."
    )
    return Task("camel_case(name)", text, solve, lambda d: [mark.join(words(d) + [""] * d.randint(0, 2))])


@family("strings", held_out=True)
def rotate_vowels(draw: Draw) -> Task:
    by = draw.randint(1, 3)

    def solve(text: str) -> str:
        places = [i for i, letter in enumerate(text) if letter in VOWELS]
        letters = list(text)
        for k, place in enumerate(places):
            letters[places[(k + by) % len(places)]] = text[place]
        return "".join(letters)

    text = (
        f"returns `text` in which each vowel (a, e, i, o, u) has moved to the place of the vowel {by} "
        "further to the right; from the end on to the first vowel again. All other characters stay."
    )
    return Task("rotate_vowels(text)", text, solve, lambda d: [sentence(d)])


@family("strings", held_out=True)
def bracket_depth(draw: Draw) -> Task:
    opening, closing = draw.choice(["()", "[]", "<>"])

    def solve(text: str) -> int:
        depth = deepest = 0
        for letter in text:
            depth += (letter == opening) - (letter == closing)
            if depth < 0:
                return -1
            deepest = max(deepest, depth)
        return -1 if depth else deepest

    text = (
        f"returns how deep the brackets {opening}{closing} in `text` are nested at most, or -1 if they do "
        "not match. Other characters are ignored."
    )
    return Task("bracket_depth(text)", text, solve, lambda d: [_brackets(d, opening, closing)])


def _brackets(draw: Draw, opening: str, closing: str) -> str:
    text = ""
    for _ in range(draw.randint(0, 4)):
        inner = draw.randint(1, 3)
        text += opening * inner + draw.choice("xyz") + closing * inner
    return text + draw.choice(["", "", opening, closing])


@family("strings", held_out=True)
def group_digits(draw: Draw) -> Task:
    size = draw.randint(2, 4)
    mark = draw.choice(",_. ")

    def solve(text: str) -> str:
        digits = "".join(letter for letter in text if letter.isdigit())
        first = len(digits) % size
        groups = [digits[:first]] if first else []
        groups += [digits[i : i + size] for i in range(first, len(digits), size)]
        return mark.join(groups)

    text = (
        f"keeps only the digits of `text` and returns them in groups of {size}, counted from the right, "
        f"separated by `{mark}`."
    )
    return Task("group_digits(text)", text, solve, lambda d: [_noise(d, "0123456789ab-")])
