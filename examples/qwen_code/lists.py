"""Families of tasks about lists."""

from __future__ import annotations

from task import Draw, Task, family, numbers


@family("lists")
def best_window(draw: Draw) -> Task:
    size = draw.randint(2, 4)
    largest = draw.random() < 0.5
    choose = max if largest else min

    def solve(values: list[int]) -> int:
        sums = [sum(values[i : i + size]) for i in range(len(values) - size + 1)]
        return choose(sums, default=0)

    text = (
        f"returns the {'largest' if largest else 'smallest'} sum of {size} consecutive elements of `values`, "
        f"or 0 if it has fewer than {size} elements."
    )
    return Task("best_window(values)", text, solve, lambda d: [numbers(d)])


@family("lists")
def drop_near(draw: Draw) -> Task:
    gap = draw.randint(2, 8)

    def solve(values: list[int]) -> list[int]:
        kept: list[int] = []
        for value in values:
            if not kept or abs(value - kept[-1]) >= gap:
                kept.append(value)
        return kept

    text = (
        f"goes through `values` in order and keeps an element if it differs by at least {gap} from the last "
        "element that was kept; the first one is always kept. It returns the list of kept elements."
    )
    return Task("drop_near(values)", text, solve, lambda d: [numbers(d)])


@family("lists")
def pairs_with_sum(draw: Draw) -> Task:
    distance = draw.randint(1, 3)

    def solve(values: list[int], target: int) -> int:
        n = len(values)
        return sum(values[i] + values[j] == target for i in range(n) for j in range(i + distance, n))

    text = (
        f"returns the number of pairs of indices i, j with j - i >= {distance} for which `values[i] + "
        "values[j]` is `target`."
    )
    return Task(
        "pairs_with_sum(values, target)", text, solve, lambda d: [numbers(d, 0, 9, 0, 5), d.randint(2, 8)]
    )


@family("lists")
def resetting_sums(draw: Draw) -> Task:
    limit = draw.randint(10, 30)

    def solve(values: list[int]) -> list[int]:
        sums = []
        total = 0
        for value in values:
            total += value
            if total > limit:
                total = 0
            sums.append(total)
        return sums

    text = (
        f"returns the list of running sums of `values`, where a running sum that is more than {limit} is set "
        "to 0 at once (0 is then in the list, and the summation goes on from 0)."
    )
    return Task("resetting_sums(values)", text, solve, lambda d: [numbers(d, low=-5, high=15)])


@family("lists")
def border_sum(draw: Draw) -> Task:
    weight = draw.randint(2, 5)

    def solve(matrix: list[list[int]]) -> int:
        last = len(matrix) - 1
        total = 0
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                on_border = i in (0, last) or j in (0, len(row) - 1)
                total += value if on_border else weight * value
        return total

    text = (
        "returns the sum of all elements of `matrix`, a list of rows of equal length, where each element "
        f"that is not in the first or last row or column counts {weight} times."
    )

    def arguments(d: Draw) -> list[object]:
        rows, columns = d.randint(1, 4), d.randint(1, 4)
        return [[[d.randint(-9, 9) for _ in range(columns)] for _ in range(rows)]]

    return Task("border_sum(matrix)", text, solve, arguments)


@family("lists")
def reorder_signs(draw: Draw) -> Task:
    order = draw.sample(["negative", "zero", "positive"], 3)
    dropped = draw.choice([None, order[-1]])

    def kind(value: int) -> str:
        return "zero" if value == 0 else "negative" if value < 0 else "positive"

    def solve(values: list[int]) -> list[int]:
        wanted = order[:2] if dropped else order
        return [v for name in wanted for v in values if kind(v) == name]

    last = f"The {order[2]} ones are left out." if dropped else f"Then come the {order[2]} ones."
    text = (
        f"returns a new list with first the {order[0]} elements of `values`, then the {order[1]} ones, each "
        f"in the order of `values`. {last}"
    )
    return Task("reorder_signs(values)", text, solve, lambda d: [numbers(d, low=-4, high=4)])


@family("lists")
def rank_from_top(draw: Draw) -> Task:
    rank = draw.randint(2, 4)

    def solve(values: list[int]) -> int:
        found = sorted(set(values), reverse=True)
        return found[rank - 1] if len(found) >= rank else -1

    name = {2: "second", 3: "third", 4: "fourth"}[rank]
    text = (
        f"returns the {name} largest different value in `values`, or -1 if there are fewer than {rank} "
        "different values."
    )
    return Task("rank_from_top(values)", text, solve, lambda d: [numbers(d, low=0, high=9)])


@family("lists")
def longest_climb(draw: Draw) -> Task:
    rise = draw.randint(1, 4)

    def solve(values: list[int]) -> list[int]:
        best: list[int] = []
        run: list[int] = []
        for value in values:
            run = [*run, value] if run and value - run[-1] >= rise else [value]
            if len(run) > len(best):
                best = run
        return best

    text = (
        f"returns the longest part of consecutive elements of `values` in which each is at least {rise} more "
        "than the one before it; of several equally long ones the first."
    )
    return Task("longest_climb(values)", text, solve, lambda d: [numbers(d, low=0, high=12)])


@family("lists")
def split_chunks(draw: Draw) -> Task:
    size = draw.randint(2, 4)
    what, measure = draw.choice([("sum", sum), ("maximum", max), ("number of elements", len)])

    def solve(values: list[int]) -> list[int]:
        return [measure(values[i : i + size]) for i in range(0, len(values), size)]

    text = (
        f"cuts `values` from the beginning into parts of {size} elements (the last one may be shorter) and "
        f"returns a list with the {what} of each part."
    )
    return Task("split_chunks(values)", text, solve, lambda d: [numbers(d)])


@family("lists", held_out=True)
def zigzag(draw: Draw) -> Task:
    start = draw.choice(["right", "left"])

    def solve(rows: list[list[int]]) -> list[int]:
        found: list[int] = []
        for index, row in enumerate(rows):
            forward = (index % 2 == 0) == (start == "right")
            found += row if forward else row[::-1]
        return found

    first = "from left to right" if start == "right" else "from right to left"
    text = (
        f"returns the elements of `rows` as one list: the first row {first}, the next row in the other "
        "direction, and so on in turns."
    )
    return Task("zigzag(rows)", text, solve, lambda d: [[numbers(d, 0, 4) for _ in range(d.randint(0, 4))]])


@family("lists", held_out=True)
def merge_intervals(draw: Draw) -> Task:
    gap = draw.randint(0, 3)

    def solve(intervals: list[list[int]]) -> list[list[int]]:
        merged: list[list[int]] = []
        for low, high in sorted(intervals):
            if merged and low - merged[-1][1] <= gap:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        return merged

    text = (
        "merges intervals given as `[low, high]`: two of them become one if they overlap or if the distance "
        f"between the end of one and the beginning of the other is at most {gap}. It returns the merged "
        "intervals as `[low, high]`, sorted."
    )

    def arguments(d: Draw) -> list[object]:
        lows = numbers(d, 0, 6, 0, 25)
        return [[[low, low + d.randint(0, 5)] for low in lows]]

    return Task("merge_intervals(intervals)", text, solve, arguments)


@family("lists", held_out=True)
def find_peaks(draw: Draw) -> Task:
    radius = draw.randint(1, 2)

    def solve(values: list[int]) -> list[int]:
        found = []
        for i, value in enumerate(values):
            around = values[max(0, i - radius) : i] + values[i + 1 : i + radius + 1]
            if all(value > other for other in around):
                found.append(i)
        return found

    text = (
        "returns the list of indices of `values` whose element is greater than every other element at most "
        f"{radius} {'place' if radius == 1 else 'places'} away."
    )
    return Task("find_peaks(values)", text, solve, lambda d: [numbers(d, low=0, high=9)])
