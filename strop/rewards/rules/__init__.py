"""Rule scorers: pure functions `compute_score(solution_str, ground_truth, **options)` that return a float or
a dict with `score`.

No text of a model makes them raise. Where a scorer improves on verl's, `compat="verl"` gives verl's result.
"""
