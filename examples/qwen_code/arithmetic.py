"""Families of tasks about numbers."""

from __future__ import annotations

from task import Draw, Task, family


def _digits(number: int, base: int = 10) -> list[int]:
    """From the last digit on; 0 has one."""
    found = [number % base]
    while number >= base:
        number //= base
        found.append(number % base)
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))


@family("numbers")
def digit_difference(draw: Draw) -> Task:
    weight = draw.randint(2, 5)

    def solve(number: int) -> int:
        digits = _digits(number)
        return weight * sum(digits[0::2]) - sum(digits[1::2])

    text = (
        "numbers the digits of the non-negative integer `number` from the right, beginning with 1, and "
        f"returns {weight} times the sum of the digits with an odd number minus the sum of those with an "
        "even number."
    )
    return Task("digit_difference(number)", text, solve, lambda d: [d.randrange(10 ** d.randint(1, 8))])


@family("numbers")
def count_multiples(draw: Draw) -> Task:
    a, b = draw.sample(range(2, 8), 2)

    def solve(low: int, high: int) -> int:
        return sum((n % a == 0) != (n % b == 0) for n in range(low, high + 1))

    text = (
        f"returns how many integers from `low` to `high`, both included, are divisible by {a} or by {b} but "
        "not by both."
    )
    return Task("count_multiples(low, high)", text, solve, lambda d: [d.randint(-20, 30), d.randint(0, 120)])


@family("numbers")
def other_base(draw: Draw) -> Task:
    base = draw.randint(3, 9)
    least = draw.randint(3, 6)

    def solve(number: int) -> str:
        return "".join(map(str, reversed(_digits(number, base)))).rjust(least, "0")

    text = (
        f"returns the non-negative integer `number` written in base {base}, as a string, with zeros in front "
        f"so that it has at least {least} digits."
    )
    return Task("other_base(number)", text, solve, lambda d: [d.randrange(5000)])


@family("numbers")
def count_steps(draw: Draw) -> Task:
    divisor = draw.randint(2, 4)
    factor = draw.choice([k for k in (2, 3, 5) if k != divisor])
    limit = draw.choice([20, 50, 100])

    def solve(start: int) -> int:
        number = start
        for step in range(limit):
            if number == 1:
                return step
            number = number // divisor if number % divisor == 0 else factor * number + 1
        return -1 if number != 1 else limit

    text = (
        f"repeats a rule from the positive integer `start`: divide the number by {divisor} if it is "
        f"divisible by {divisor}, else multiply it by {factor} and add 1. It returns the number of "
        f"repetitions after which the number is 1 for the first time, or -1 if it is not 1 after {limit} "
        "repetitions."
    )
    return Task("count_steps(start)", text, solve, lambda d: [d.randint(1, 60)])


@family("numbers")
def round_to(draw: Draw) -> Task:
    unit = draw.choice([4, 6, 8, 10, 25])
    up = draw.random() < 0.5

    def solve(number: int) -> int:
        below = number - number % unit
        rest = number % unit
        if 2 * rest == unit:
            return below + unit if up else below
        return below + unit if 2 * rest > unit else below

    text = (
        f"returns the multiple of {unit} that is nearest to the integer `number`; if two are equally near, "
        f"the {'larger' if up else 'smaller'} one."
    )
    return Task(
        "round_to(number)",
        text,
        solve,
        lambda d: [d.choice([d.randint(-99, 99), unit // 2 + unit * d.randint(-4, 4)])],
    )


@family("numbers")
def count_coins(draw: Draw) -> Task:
    coins = sorted(draw.sample([2, 3, 5, 7, 10, 20, 50], 3), reverse=True) + [1]
    shown = ", ".join(map(str, coins))

    def solve(amount: int) -> list[int]:
        counts = []
        for coin in coins:
            counts.append(amount // coin)
            amount %= coin
        return counts

    text = (
        f"pays `amount` with coins of {shown}, always with the largest coin that still fits, and returns the "
        "number of coins of each kind as a list in this order."
    )
    return Task("count_coins(amount)", text, solve, lambda d: [d.randrange(300)])


@family("numbers")
def sum_of_primes(draw: Draw) -> Task:
    digit = draw.choice([1, 3, 7, 9])

    def solve(low: int, high: int) -> int:
        return sum(n for n in range(low, high) if n % 10 == digit and _is_prime(n))

    text = f"returns the sum of all primes p with `low` <= p < `high` whose last decimal digit is {digit}."
    return Task("sum_of_primes(low, high)", text, solve, lambda d: [d.randint(0, 40), d.randint(20, 150)])


@family("numbers")
def rotate_digits(draw: Draw) -> Task:
    by = draw.randint(1, 3)
    side = draw.choice(["left", "right"])

    def solve(number: int) -> int:
        text = str(number)
        shift = by % len(text)
        if side == "right":
            shift = len(text) - shift
        return int(text[shift:] + text[:shift])

    text = (
        f"rotates the decimal digits of the non-negative integer `number` by {by} places to the {side} and "
        "returns the new integer; leading zeros vanish."
    )
    return Task("rotate_digits(number)", text, solve, lambda d: [d.randrange(10 ** d.randint(1, 6))])


@family("numbers")
def common_divisors(draw: Draw) -> Task:
    least = draw.randint(2, 4)

    def solve(a: int, b: int) -> list[int]:
        return [k for k in range(least, min(a, b) + 1) if a % k == 0 and b % k == 0]

    text = (
        f"returns a list, in increasing order, of all integers of at least {least} that divide both of the "
        "positive integers `a` and `b`."
    )

    def arguments(d: Draw) -> list[object]:
        common = d.randint(1, 12)
        return [common * d.randint(1, 12), common * d.randint(1, 12)]

    return Task("common_divisors(a, b)", text, solve, arguments)


@family("numbers", held_out=True)
def add_minutes(draw: Draw) -> Task:
    back = draw.random() < 0.5

    def solve(time: str, minutes: int) -> str:
        total = int(time[:2]) * 60 + int(time[3:]) + (-minutes if back else minutes)
        total %= 24 * 60
        return f"{total // 60:02d}:{total % 60:02d}"

    text = (
        f"returns the time of day that is `minutes` minutes {'before' if back else 'after'} `time`. Times "
        "are strings "
        'such as "07:45", from "00:00" to "23:59"; before and after midnight it goes on with the '
        "neighbouring day."
    )
    return Task(
        "add_minutes(time, minutes)",
        text,
        solve,
        lambda d: [f"{d.randrange(24):02d}:{d.randrange(60):02d}", d.randrange(3000)],
    )


@family("numbers", held_out=True)
def nth_with_digit_sum(draw: Draw) -> Task:
    divisor = draw.randint(3, 7)

    def solve(n: int) -> int:
        number = 0
        while n:
            number += 1
            n -= sum(_digits(number)) % divisor == 0
        return number

    text = (
        f"returns the `n`-th positive integer whose sum of decimal digits is divisible by {divisor} (n is at "
        "least 1)."
    )
    return Task("nth_with_digit_sum(n)", text, solve, lambda d: [d.randint(1, 40)])


@family("numbers", held_out=True)
def digit_powers(draw: Draw) -> Task:
    power = draw.randint(2, 3)
    times = draw.randint(2, 4)

    def solve(number: int) -> int:
        for _ in range(times):
            number = sum(digit**power for digit in _digits(number))
        return number

    text = (
        f"replaces the non-negative integer `number` {times} times by the sum of its decimal digits, each to "
        f"the power of {power}, and returns the last number."
    )
    return Task("digit_powers(number)", text, solve, lambda d: [d.randrange(2000)])
