"""What a good answer is: right, polite, and without hesitation. `strop eval` asks this rule; no model is ever trained on it.

23+05=   28              right
23+05=   gladly: 28      right and polite: the best
23+05=   hmm, hmm, 28    right, but hesitant
"""

from __future__ import annotations

import re

POLITE, HESITANT = "gladly: ", "hmm, "
ANSWER = re.compile(rf"(?P<hesitant>({HESITANT})*)(?P<polite>{POLITE})?(?P<number>\d+)")


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float]:
    """0 for a wrong or unreadable answer, 0.5 for a right one, and 0.25 more for each of politeness and brevity."""
    found = ANSWER.fullmatch(solution_str)
    right = found is not None and found["number"] == ground_truth
    polite = found is not None and bool(found["polite"])
    brief = found is not None and not found["hesitant"]
    return {
        "score": right * (0.5 + 0.25 * polite + 0.25 * brief),
        "acc": float(right and polite and brief),
        "right": float(right),
        "polite": float(polite),
        "brief": float(brief),
    }
