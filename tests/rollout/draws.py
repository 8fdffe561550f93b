"""The draw of a token by the kernel beside plain torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from strop.rollout.native import decode_rows as rows
from strop.rollout.native.decode_rows import DecodeRows


def filled(device: torch.device) -> DecodeRows:
    """Rows in every state, with every temperature, close to their limits."""
    found, index = DecodeRows(device), torch.arange(64, device=device)
    found.resize(64, 20, 0, 3)
    found.fields["length"][:] = index % 15 + 1
    found.fields["num_known"][:] = (index % 5 == 2) * 11
    found.fields["limit"][:] = 12 + index % 8
    found.fields["state"][:] = (index % 7 == 3).long()
    found.fields["stream"][:] = torch.randint(
        -(2**62), 2**62, (64,), generator=torch.Generator().manual_seed(3)
    ).to(device)
    found.fields["temperature"][:] = 0.5 + index % 5 * 0.3
    found.fields["greedy"][:] = index % 4 == 0
    found.fields["stops"][:, 0], found.fields["stops"][:, 1] = 5, index
    return found


def assert_drawn_as_plain(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, vocabulary: int, used: dict[str, bool]
) -> None:
    from strop.rollout.native.kernels import draw

    torch.manual_seed(0)
    logits = torch.randn(40, vocabulary, device=device) * 3
    logits[3], logits[5, 1], logits[11, 3] = torch.nan, torch.inf, torch.nan
    logits[7, : vocabulary // 2], logits[9, 1:] = -torch.inf, -torch.inf
    which = torch.randperm(64)[:40].to(device)
    plain, fast = filled(device), filled(device)
    monkeypatch.setattr(rows, "kernels", lambda kind: None)
    plain.sample_next(
        which, logits, {**used, "top_k": 0, "top_p": False, "min_p": False, "penalty": False}, 20
    )
    draw(logits, which, fast.fields, **used)
    for name, expected in plain.fields.items():
        if name != "log_probs":
            assert torch.equal(fast.fields[name], expected), name
    usable = plain.fields["log_probs"].isfinite() & fast.fields["log_probs"].isfinite()
    assert (plain.fields["log_probs"] - fast.fields["log_probs"])[usable].abs().max() < 2e-6
