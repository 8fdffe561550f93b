"""Geometry problems with a drawing, as hiyouga/geometry3k has them."""

from __future__ import annotations

from strop.data.files import Row
from strop.data.schema import to_plain

INSTRUCTION = (
    "First think about the problem step by step, inside <think> </think>. Then give the final answer within "
    "\\boxed{}."
)


def geo3k(row: Row, split: str, index: int) -> Row:
    """A row has images, problem with <image> where they go, and answer."""
    images = to_plain(row.get("images"))
    problem = row["problem"]
    count = len(images) if isinstance(images, list) else 0
    if not count or problem.count("<image>") != count:
        raise ValueError(f"it has {count} images and {problem.count('<image>')} <image> in its problem")
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": split, "index": index, "question": problem, "answer": row["answer"]},
    }
