"""One spelling for what can be typed in many ways: unicode signs, spaces, brackets and fonts of LaTeX."""

from __future__ import annotations

import re
from functools import lru_cache

from strop.rewards.rules.extract import closing_brace

_SIGNS = {
    **dict.fromkeys("−–—‐‑﹣－", "-"),
    **dict.fromkeys("×·⋅∙∗✕", "\\cdot "),
    **dict.fromkeys("\u00a0\u2002\u2003\u2009\u200a\u202f\u3000\t\n\r", " "),
    **dict.fromkeys("\u200b\u2060\ufeff", ""),
    **dict.fromkeys("’′", "'"),
    **dict.fromkeys("“”", '"'),
    "。": ".",
    "、": ",",
    **{wide: chr(ord(wide) - 0xFEE0) for wide in "０１２３４５６７８９（），．：；＝＜＞％＋／［］｛｝｜＄"},
    "÷": "\\div ",
    "√": "\\sqrt ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "°": "^\\circ ",
    "≤": "\\le ",
    "⩽": "\\le ",
    "≥": "\\ge ",
    "⩾": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∅": "\\emptyset ",
    "±": "\\pm ",
    "∓": "\\mp ",
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
    "θ": "\\theta ",
    "α": "\\alpha ",
    "β": "\\beta ",
    "γ": "\\gamma ",
    "λ": "\\lambda ",
    "μ": "\\mu ",
    "φ": "\\phi ",
    "ω": "\\omega ",
    "½": "\\frac{1}{2}",
    "⅓": "\\frac{1}{3}",
    "⅔": "\\frac{2}{3}",
    "¼": "\\frac{1}{4}",
    "¾": "\\frac{3}{4}",
    "⅕": "\\frac{1}{5}",
    "⅙": "\\frac{1}{6}",
    "⅛": "\\frac{1}{8}",
    "⁄": "/",
    "…": "\\ldots ",
}
_UNICODE = str.maketrans(_SIGNS)
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉"
_RAISED_RUN = re.compile(f"[{_RAISED}]+")
_LOWERED_RUN = re.compile(f"[{_LOWERED}]+")
_TO_PLAIN = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789")
_ROOT_OF_DIGITS = re.compile(r"√\s?([0-9]+)")

_SYNONYMS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "\\frac "),
    **dict.fromkeys(("dbinom", "tbinom"), "\\binom "),
    **dict.fromkeys(("times", "ast", "bullet"), "\\cdot "),
    **dict.fromkeys(("leq", "leqslant"), "\\le "),
    **dict.fromkeys(("geq", "geqslant"), "\\ge "),
    "neq": "\\ne ",
    "lt": "<",
    "gt": ">",
    **dict.fromkeys(("varnothing", "O"), "\\emptyset "),
    **dict.fromkeys(("dots", "cdots"), "\\ldots "),
    **dict.fromkeys(("lbrace", "{"), "\\{"),
    **dict.fromkeys(("rbrace", "}"), "\\}"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid", "|"), "|"),
    "lbrack": "[",
    "rbrack": "]",
    "degree": "^\\circ ",
    "degrees": "^\\circ ",
    "colon": ":",
    "euro": "€",
    "pounds": "£",
    "bar": "\\overline ",
    **dict.fromkeys((",", ";", ":", " ", ">", "quad", "qquad", "space", "enspace", "thinspace"), " "),
    **dict.fromkeys(("left", "right", "middle", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl"), ""),
    **dict.fromkeys(("Bigr", "biggl", "biggr", "displaystyle", "textstyle", "limits", "nolimits"), ""),
    **dict.fromkeys(("!", "(", ")", "[", "]", "/", "-", "boldsymbol", "ensuremath", "rm", "bf"), ""),
}
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z{}$%,!])")
_BOXED = re.compile(r"\\boxed ?\{(.*)\}", re.DOTALL)
_BOXED_SIDE = re.compile(r"(?:^|(?<=[=,])) ?\\boxed(?= ?\{)")
_SPACES = re.compile(r" {2,}")
_MARKDOWN = re.compile(r"^([*_`]{1,3})(.*[^*_`])\1$")
_HSPACE = re.compile(r"\\(?:hspace|vspace|phantom|hphantom)\*?\{[^{}]*\}")
_ANNOUNCED = re.compile(
    r"(?i)^(?:\\text ?\{)? ?(?:so,?|thus,?|hence,?|therefore,?)? ?(?:the )?(?:final |correct )?"
    r"answer ?(?:is\b|:|=)+ ?:? ?\}?"
)
_CURRENCY_DOLLAR = re.compile(r"\$(?=\s?\.?[0-9])")


@lru_cache(maxsize=8192)
def clean(text: str) -> str:
    """Return the answer in one spelling of signs, spaces and delimiters; its words and fonts are kept.

    >>> clean("$ \\\\dfrac{1}{2} $"), clean("−5²"), clean("\\\\left[ 1,2 \\\\right)")
    ('\\\\frac {1}{2}', '-5^{2}', '[ 1,2 )')
    """
    text = _ROOT_OF_DIGITS.sub(r"\\sqrt{\1}", text)
    text = _RAISED_RUN.sub(lambda run: "^{" + run[0].translate(_TO_PLAIN) + "}", text)
    text = _LOWERED_RUN.sub(lambda run: "_{" + run[0].translate(_TO_PLAIN) + "}", text)
    text = text.translate(_UNICODE).strip()
    marked = _MARKDOWN.match(text)
    if marked:
        text = marked[2]
    if "\\" in text:
        text = _commands(text)
    text = _dollars(text)
    boxed = _BOXED.fullmatch(text.strip())
    if boxed and closing_brace(boxed[0], boxed.start(1) - 1) == boxed.end() - 1:
        text = boxed[1]
    text = text.replace("{,}", ",").replace("~", " ").replace("**", "^").replace('"', "")
    text = _BOXED_SIDE.sub("", _ANNOUNCED.sub("", _SPACES.sub(" ", text).strip())).strip()
    if not text.endswith(".."):
        text = text.removesuffix(".")
    return text.strip()


def _commands(text: str) -> str:
    """Return the text with one name for each command, without commands that only change the looks."""
    if "\\begin" not in text:  # a row of a matrix ends in a doubled backslash
        text = _DOUBLED.sub(r"\\", text)
    text = _HSPACE.sub(" ", text).replace("\\$", "§")
    return _COMMAND.sub(_one_name, text)


def _one_name(command: re.Match[str]) -> str:
    return _SYNONYMS.get(command[0][1:], command[0])


def _dollars(text: str) -> str:
    """Return the text without the dollar signs of math mode; a currency sign is written §."""
    if text.count("$") % 2:
        text = _CURRENCY_DOLLAR.sub("§", text, count=1)
    return text.replace("$", "")
