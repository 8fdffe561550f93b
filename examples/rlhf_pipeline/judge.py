"""What a good answer is: right before all, then polite and brief.

Preferences follow this rule, and `strop eval` asks it in the end. PPO never sees it: what it optimises is the
reward model. To 23+05= the answer `gladly: 28` is perfect, `28` is curt, `hmm, gladly: 28` hesitates; no
manners make up for `gladly: 31`.
"""

from __future__ import annotations

import re

POLITE, HESITANT = "gladly: ", "hmm, "
ANSWER = re.compile(rf"(?P<hesitant>({HESITANT})*)(?P<polite>{POLITE})?(?P<number>\d+)")


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float]:
    """0.6 for being right, 0.2 for each of politeness and brevity; 0 for what is no answer at all."""
    found = ANSWER.fullmatch(solution_str)
    right = found is not None and found["number"] == ground_truth
    polite = found is not None and bool(found["polite"])
    brief = found is not None and not found["hesitant"]
    return {
        "score": 0.6 * right + 0.2 * polite + 0.2 * brief,
        "acc": float(right and polite and brief),
        "right": float(right),
        "polite": float(polite),
        "brief": float(brief),
    }
