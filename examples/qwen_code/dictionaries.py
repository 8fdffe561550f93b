"""Families of tasks about dictionaries."""

from __future__ import annotations

from collections import Counter

from task import Draw, Task, family, words

NAMES = ("ann", "bob", "cid", "dora", "eve", "finn")


def _records(draw: Draw, most: int = 8, low: int = 0, high: int = 20) -> list[list[object]]:
    return [[draw.choice(NAMES), draw.randint(low, high)] for _ in range(draw.randint(0, most))]


def _totals(draw: Draw, low: int = -5, high: int = 15) -> dict[str, int]:
    chosen = draw.sample(NAMES, draw.randint(0, 6))
    return {name: draw.randint(low, high) for name in chosen}


@family("dictionaries")
def group_words(draw: Draw) -> Task:
    keys = {"first letter": lambda w: w[0], "last letter": lambda w: w[-1], "length": lambda w: str(len(w))}
    name = draw.choice(sorted(keys))
    least = draw.randint(1, 2)

    def solve(given: list[str]) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for word in given:
            groups.setdefault(keys[name](word), []).append(word)
        return {key: sorted(found) for key, found in groups.items() if len(found) >= least}

    shown = f"{name} as a string" if name == "length" else name
    text = (
        f"groups the strings of `words` by their {shown} and returns a dictionary from it to the sorted list "
        f"of the strings of the group, duplicates included. Groups of fewer than {least} strings are left "
        "out."
    )
    return Task("group_words(words)", text, solve, lambda d: [words(d, 0, 8)])


@family("dictionaries")
def frequent_letters(draw: Draw) -> Task:
    times = draw.randint(2, 3)
    exact = draw.random() < 0.5

    def solve(text: str) -> list[str]:
        counts = Counter(text.replace(" ", ""))
        return sorted(k for k, n in counts.items() if (n == times if exact else n >= times))

    text = (
        f"returns the sorted list of the characters that occur {'exactly' if exact else 'at least'} {times} "
        "times in `text`, without spaces."
    )
    return Task("frequent_letters(text)", text, solve, lambda d: [" ".join(words(d, 0, 5))])


@family("dictionaries")
def invert(draw: Draw) -> Task:
    prefix = draw.choice("xkv")

    def solve(mapping: dict[str, int]) -> dict[str, list[str]]:
        inverted: dict[str, list[str]] = {}
        for key in sorted(mapping):
            inverted.setdefault(f"{prefix}{mapping[key]}", []).append(key)
        return inverted

    text = (
        "inverts the dictionary `mapping` of strings to integers: the keys of the result are the strings "
        f"`{prefix}` + value, each with the sorted list of the keys that had this value."
    )
    return Task(
        "invert(mapping)",
        text,
        solve,
        lambda d: [_totals(d, 0, 3)],
    )


@family("dictionaries")
def add_tables(draw: Draw) -> Task:
    least = draw.randint(0, 10)
    weight = draw.randint(2, 4)

    def solve(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
        total = {k: first.get(k, 0) + weight * second.get(k, 0) for k in {*first, *second}}
        return {k: v for k, v in total.items() if v >= least}

    text = (
        "returns a dictionary with, for every key of `first` or `second`, the value in `first` plus "
        f"{weight} times the value in `second` (0 where it is missing). Keys whose result is below {least} "
        "are left out."
    )
    return Task("add_tables(first, second)", text, solve, lambda d: [_totals(d), _totals(d)])


@family("dictionaries")
def best_names(draw: Draw) -> Task:
    count = draw.randint(2, 3)
    highest = draw.random() < 0.5

    def solve(scores: dict[str, int]) -> list[str]:
        sign = -1 if highest else 1
        return sorted(scores, key=lambda name: (sign * scores[name], name))[:count]

    text = (
        f"returns the list of the {count} keys of `scores` with the {'highest' if highest else 'lowest'} "
        f"values, the {'highest' if highest else 'lowest'} first; keys with equal values in alphabetical "
        "order. If there are fewer keys, it returns all of them."
    )
    return Task(
        "best_names(scores)",
        text,
        solve,
        lambda d: [_totals(d, 0, 4)],
    )


@family("dictionaries")
def mean_by_name(draw: Draw) -> Task:
    least = draw.randint(1, 3)

    def solve(records: list[list]) -> dict[str, int]:
        groups: dict[str, list[int]] = {}
        for name, value in records:
            groups.setdefault(name, []).append(value)
        return {name: sum(found) // len(found) for name, found in groups.items() if len(found) >= least}

    text = (
        "gets a list of pairs `[name, value]` and returns a dictionary from each name to the mean of its "
        f"values, rounded down to an integer. Names with fewer than {least} values are left out."
    )
    return Task("mean_by_name(records)", text, solve, lambda d: [_records(d)])


@family("dictionaries")
def last_entries(draw: Draw) -> Task:
    factor = draw.randint(2, 5)

    def solve(records: list[list]) -> dict[str, int]:
        table: dict[str, int] = {}
        for name, value in records:
            if name in table and value < table[name]:
                table[name] -= 1
            else:
                table[name] = factor * value
        return table

    text = (
        "goes through the pairs `[name, value]` of `records` and keeps a table: if the name is in the table "
        f"with a number greater than the value, this number is lowered by 1, else the name gets {factor} "
        "times the value. It returns the table as a dictionary."
    )
    return Task("last_entries(records)", text, solve, lambda d: [_records(d)])


@family("dictionaries")
def winner(draw: Draw) -> Task:
    percent = draw.choice([30, 40, 50])

    def solve(votes: list[str]) -> str:
        counts = Counter(votes)
        best = max(counts.values(), default=0)
        leaders = [name for name in counts if counts[name] == best]
        if len(leaders) != 1 or 100 * best <= percent * len(votes):
            return "none"
        return leaders[0]

    text = (
        "returns the name that occurs most often in `votes`, if it is the only one with that many votes and "
        "has more "
        f'than {percent}% of all votes, else "none".'
    )
    return Task(
        "winner(votes)", text, solve, lambda d: [[d.choice(NAMES[:3]) for _ in range(d.randint(0, 9))]]
    )


@family("dictionaries", held_out=True)
def stock(draw: Draw) -> Task:
    limit = draw.randint(8, 15)

    def solve(changes: list[list]) -> dict[str, int]:
        table: dict[str, int] = {}
        for name, change in changes:
            table[name] = min(limit, max(0, table.get(name, 0) + change))
        return {name: n for name, n in table.items() if n}

    text = (
        "applies the pairs `[name, change]` of `changes` in order to a stock that is 0 for every name in the "
        f"beginning. A stock never falls below 0 or rises above {limit}: what goes beyond is lost at once. "
        "It returns a dictionary of the names whose stock is not 0 in the end."
    )
    return Task("stock(changes)", text, solve, lambda d: [_records(d, 9, -8, 10)])


@family("dictionaries", held_out=True)
def follow(draw: Draw) -> Task:
    most = draw.randint(2, 5)

    def solve(links: dict[str, str], start: str) -> list[str]:
        path = [start]
        while len(path) <= most and path[-1] in links:
            path.append(links[path[-1]])
        return path

    text = (
        "follows the dictionary `links` from `start`: the next key is the value of the last one, at most "
        f"{most} times and until a value is not a key. It returns the list of all keys and values on the "
        "way, beginning with `start`."
    )

    def arguments(d: Draw) -> list[object]:
        return [{n: d.choice(NAMES) for n in d.sample(NAMES, d.randint(0, 5))}, d.choice(NAMES)]

    return Task("follow(links, start)", text, solve, arguments)
