"""Read one expression: sums, products, powers, roots, fractions, functions; LaTeX or plain."""

from __future__ import annotations

from fractions import Fraction

from strop.rewards.rules.maths.nodes import (
    INFINITY,
    PI,
    Apply,
    Node,
    Number,
    Symbol,
    TooLarge,
    Unreadable,
)
from strop.rewards.rules.maths.tokens import FUNCTION_NAMES, Token

MAX_DEPTH = 30
MAX_DIGITS = 1000
_DEGREE = Apply("/", (PI, Number(Fraction(180))))
_INVERSES = {"\\sin": "arcsin", "\\cos": "arccos", "\\tan": "arctan"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "|": "|"}
_GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "kappa", "lambda"),
    *("mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Delta", "Omega"),
    *("Gamma", "Theta", "Lambda", "Sigma", "Phi", "Psi", "ell"),
)
END = Token("end", "")


def parse_expression(tokens: list[Token]) -> Node:
    """Return the tree of an expression; Unreadable if the tokens are none."""
    return _Reader(tokens).whole()


def parse_number(text: str) -> Number:
    """Return the number of a token: digits, with a point or an exponent."""
    if len(text) > MAX_DIGITS:
        raise TooLarge(f"A number has {len(text)} digits.")
    if text.isdecimal():
        return Number(Fraction(int(text)))
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 5 or abs(int(exponent or "0")) > MAX_DIGITS:
        raise TooLarge(f"The exponent of {text} is out of range.")
    whole, point, places = mantissa.partition(".")
    value = Fraction(int(whole + places), 10 ** len(places)) * Fraction(10) ** int(exponent or "0")
    if not point:
        return Number(value)
    return Number(value, len((whole + places).lstrip("0")), len(places) - int(exponent or "0"))


class _Reader:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[Token]):
        self.tokens = list(tokens)
        self.position = 0
        self.depth = 0
        self.bars = 0

    def whole(self) -> Node:
        node = self.sum()
        if self.next is not END:
            raise Unreadable(f"{self.next.text!r} is not expected.")
        return node

    @property
    def next(self) -> Token:
        if self.position < len(self.tokens):
            return self.tokens[self.position]
        return END

    def take(self, *texts: str) -> bool:
        """Step over the next token if it is one of these signs."""
        if self.next.kind in ("sign", "command") and self.next.text in texts:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable(f"{text!r} is missing.")

    # --- Sums, products, powers -----------------------------------------------------------------------------

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"The expression is nested deeper than {MAX_DEPTH}.")
        node = self.product()
        while self.next.text in ("+", "-") and self.next.kind == "sign":
            operator = self.next.text
            self.position += 1
            node = Apply(operator, (node, self.product()))
        self.depth -= 1
        return node

    def product(self) -> Node:
        if self.take("-"):
            return Apply("neg", (self.product(),))
        if self.take("+"):
            return self.product()
        node = self.mixed_number() or self.power()
        while True:
            if self.take("*", "\\cdot"):
                node = Apply("*", (node, self.signed_power()))
            elif self.take("/", "\\div"):
                node = Apply("/", (node, self.signed_power()))
            elif self.starts_factor():
                if self.next.kind == "number" and self.tokens[self.position - 1].kind == "number":
                    raise Unreadable("Two numbers stand side by side.")
                node = Apply("*", (node, self.power()))
            else:
                return node

    def signed_power(self) -> Node:
        if self.take("-"):
            return Apply("neg", (self.signed_power(),))
        if self.take("+"):
            return self.signed_power()
        return self.power()

    def starts_factor(self) -> bool:
        token = self.next
        if token.kind in ("number", "letter", "word"):
            return True
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)
        if token.kind != "command":
            return False
        name = token.text[1:]
        if name in ("frac", "sqrt", "binom", "pi", "infty", "lfloor", "lceil", "overline"):
            return True
        return name in FUNCTION_NAMES or name in _GREEK

    def mixed_number(self) -> Node | None:
        """Read an integer and a proper fraction, as 1 1/2 or 1\\frac{1}{2}; None if there is none."""
        start = self.position
        token = self.next
        if token.kind != "number" or not token.text.isdigit():
            return None
        self.position += 1
        fraction = self.proper_fraction()
        if fraction is None:
            self.position = start
            return None
        return Number(parse_number(token.text).value + fraction)

    def proper_fraction(self) -> Fraction | None:
        if self.next.text == "\\frac":
            saved = list(self.tokens)
            part = self.fraction()
            top, bottom = part.arguments
            if isinstance(top, Number) and isinstance(bottom, Number) and 0 < top.value < bottom.value:
                return top.value / bottom.value
            self.tokens = saved
            return None
        pieces = self.tokens[self.position : self.position + 3]
        if [piece.kind for piece in pieces] != ["number", "sign", "number"] or pieces[1].text != "/":
            return None
        if not (pieces[0].text.isdigit() and pieces[2].text.isdigit()):
            return None
        top_value = parse_number(pieces[0].text).value
        bottom_value = parse_number(pieces[2].text).value
        if not 0 < top_value < bottom_value:
            return None
        self.position += 3
        return top_value / bottom_value

    def power(self) -> Node:
        node = self.postfixed(self.atom())
        return self.raised(node)

    def raised(self, node: Node) -> Node:
        if not self.take("^"):
            return node
        if self.degree():
            return self.raised(Apply("*", (node, _DEGREE)))
        return self.postfixed(Apply("^", (node, self.exponent())))

    def exponent(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"The expression is nested deeper than {MAX_DEPTH}.")
        if self.take("-"):
            node: Node = Apply("neg", (self.exponent(),))
        elif self.take("+"):
            node = self.exponent()
        else:
            node = self.atom()
            if self.take("^"):
                node = Apply("^", (node, self.exponent()))
        self.depth -= 1
        return node

    def degree(self) -> bool:
        if self.take("\\circ"):
            return True
        texts = [token.text for token in self.tokens[self.position : self.position + 3]]
        if texts == ["{", "\\circ", "}"]:
            self.position += 3
            return True
        return False

    def postfixed(self, node: Node) -> Node:
        while True:
            if self.take("!"):
                node = Apply("factorial", (node,))
            elif self.take("%", "\\%"):
                node = Apply("/", (node, Number(Fraction(100))))
            else:
                return node

    # --- Atoms ----------------------------------------------------------------------------------------------

    def atom(self) -> Node:
        token = self.next
        if token.kind == "number":
            self.position += 1
            return self.number(token.text)
        if token.kind == "letter" or (token.kind == "word" and len(token.text) == 1):
            self.position += 1
            return self.subscripted(token.text)
        if token.kind == "sign" and token.text in ("(", "[", "{", "|"):
            return self.bracketed(token.text)
        if token.kind == "command":
            return self.command(token.text)
        raise Unreadable(f"{token.text!r} is not expected.")

    def bracketed(self, opening: str) -> Node:
        self.position += 1
        if opening == "|":
            self.bars += 1
        outer_bars = self.bars
        if opening != "|":
            self.bars = 0
        node = self.sum()
        self.bars = outer_bars
        if opening == "|":
            self.bars -= 1
            self.expect("|")
            return Apply("abs", (node,))
        if opening == "{" and self.take("\\over"):
            node = Apply("/", (node, self.sum()))
        elif opening == "{" and self.take("\\choose"):
            node = Apply("binomial", (node, self.sum()))
        self.expect(_CLOSING[opening])
        return node

    def number(self, text: str) -> Node:
        """Read what may follow digits: a repeating part, dots, or the base of the numeral."""
        if self.next.text == "\\overline" and "e" not in text.lower():
            repeating = self.repeating(text)
            if repeating is not None:
                return repeating
        if self.next.text == "\\ldots" or self._three_dots():
            return self.continued(text)
        if text.isdigit() and self.next.text == "_":
            self.position += 1
            base = self.argument()
            if not isinstance(base, Number) or base.value.denominator != 1 or not 2 <= base.value <= 36:
                raise Unreadable("The base of a numeral is an integer from 2 to 36.")
            try:
                return Number(Fraction(int(text, int(base.value))))
            except ValueError as error:
                raise Unreadable(f"{text} is no numeral of base {base.value}.") from error
        return parse_number(text)

    def _three_dots(self) -> bool:
        texts = [token.text for token in self.tokens[self.position : self.position + 3]]
        if texts == [".", ".", "."]:
            self.position += 2
            return True
        return False

    def repeating(self, text: str) -> Node | None:
        """Read 0.1\\overline{6}."""
        pieces = self.tokens[self.position : self.position + 4]
        texts = [piece.text for piece in pieces]
        if len(texts) < 4 or texts[1] != "{" or texts[3] != "}" or not texts[2].isdecimal():
            return None
        self.position += 4
        return _periodic(text, texts[2])

    def continued(self, text: str) -> Node:
        """Read 0.333\\ldots, whose last digit repeats; Unreadable if it does not."""
        self.position += 1
        whole, point, places = text.partition(".")
        if not point or len(places) < 3 or len(set(places[-3:])) > 1:
            raise Unreadable(f"{text}... does not say how it goes on.")
        return _periodic(f"{whole}.{places.rstrip(places[-1])}", places[-1])

    def subscripted(self, name: str) -> Node:
        if not self.take("_"):
            return Symbol(name)
        if not self.take("{"):
            name = f"{name}_{self.next.text}"
            self.position += 1
            return Symbol(name)
        pieces = []
        while not self.take("}"):
            if self.next is END or self.next.text == "{":
                raise Unreadable("A subscript is not closed.")
            pieces.append(self.next.text)
            self.position += 1
        return Symbol(f"{name}_{''.join(pieces)}")

    def command(self, text: str) -> Node:
        name = text[1:]
        if name == "frac":
            return self.fraction()
        self.position += 1
        if name == "sqrt":
            return self.root()
        if name == "binom":
            return Apply("binomial", (self.argument(), self.argument()))
        if name in ("lfloor", "lceil"):
            node = self.sum()
            self.expect(_CLOSING[text])
            return Apply({"lfloor": "floor", "lceil": "ceil"}[name], (node,))
        if name == "pi":
            return PI
        if name == "infty":
            return INFINITY
        if name in FUNCTION_NAMES:
            return self.function(text)
        if name in _GREEK:
            return self.subscripted(text)
        raise Unreadable(f"{text} is not known.")

    def fraction(self) -> Apply:
        self.position += 1
        return Apply("/", (self.argument(), self.argument()))

    def root(self) -> Node:
        index: Node = Number(Fraction(2))
        if self.take("["):
            index = self.sum()
            self.expect("]")
        return Apply("root", (self.argument(), index))

    def argument(self) -> Node:
        """Read the argument of a LaTeX command: a group, a command, or one character."""
        token = self.next
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.position] = Token("number", token.text[1:], True)
            return parse_number(token.text[0])
        if token.text == "-" and token.kind == "sign":  # \frac{...}-1 is not LaTeX, but it is clear
            raise Unreadable("An argument is missing.")
        if token.text == "(":
            return self.bracketed("(")
        return self.atom()

    def function(self, text: str) -> Node:
        """Read a function, its power and base, and its argument, with or without brackets."""
        name = text[1:]
        base: Node | None = None
        if name == "log" and self.take("_"):
            base = self.argument()
        power: Node | None = None
        if self.take("^"):
            power = self.exponent()
            if power == Apply("neg", (Number(Fraction(1)),)) and text in _INVERSES:
                name = _INVERSES[text]
                power = None
        in_brackets = self.next.text in ("(", "[", "{")
        if in_brackets:
            inner = self.bracketed(self.next.text)
        else:
            inner = self.unbracketed()
        node: Node = Apply(name, (inner,))
        if base is not None:
            node = Apply("/", (Apply("ln", (inner,)), Apply("ln", (base,))))
        if power is not None:
            node = Apply("^", (node, power))
        return node

    def unbracketed(self) -> Node:
        """Read the product behind a function, up to the next function or operator."""
        if self.take("-"):
            return Apply("neg", (self.unbracketed(),))
        node = self.power()
        while self.starts_factor() and self.next.text[1:] not in FUNCTION_NAMES and self.next.text != "(":
            if self.next.kind == "number" and self.tokens[self.position - 1].kind == "number":
                raise Unreadable("Two numbers stand side by side.")
            node = Apply("*", (node, self.power()))
        return node


def _periodic(start: str, period: str) -> Number:
    """Return the value of a decimal whose last digits repeat."""
    if "." not in start:
        start += "."
    whole, _, places = start.partition(".")
    if len(start) + len(period) > MAX_DIGITS:
        raise TooLarge("A repeating decimal has too many digits.")
    value = Fraction(int((whole or "0") + places), 10 ** len(places))
    return Number(value + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(places)))
