"""Rule scorers: pure functions `compute_score(solution_str, ground_truth, **options)`, giving a float or a dict with `score`.

No text a model can write makes them raise. Where a scorer improves on verl's, `compat="verl"` gives verl's result.
"""
