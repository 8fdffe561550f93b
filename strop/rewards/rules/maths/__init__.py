"""Mathematical equality of two written answers, by exact arithmetic, in bounded time.

`equality.compare` is the entry. `spelling` gives LaTeX and plain text one spelling, `tokens` cuts it,
`answers` reads its structure (lists, sets, intervals, equations, quantities with units), `expressions` reads
one expression, `values` computes it: exactly where it is rational, with 50 digits where it is not, and at
fixed points where it has variables. Nothing is expanded or simplified, and numbers have a largest size, so no
answer can take long.
"""
