"""Which of the drafted tokens of a row are kept.

A pass computes the logits after the newest token of a row and after each of its drafts, and samples a token
from all of them as an ordinary step would: from the random stream of its position, with all sampling
settings. As long as the sampled token is the draft, the logits after the draft are those that an ordinary
step would have computed next. So the tokens are those of decoding without drafts, one by one: a draft is kept
with the probability that the model gives it, which is the rejection rule for drafts without a distribution.

Drafts of a draft model have a distribution q. A draft x is kept with probability min(1, p(x) / q(x)), where p
is the distribution of the policy; where it is not kept, the token is drawn from max(0, p - q). So a token has
the distribution p, and more drafts are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.rollout.native.decode_rows import ERROR, LENGTH, RUNNING, STOP, DecodeRows, Features
from strop.rollout.native.sampler import SampledTokens, drawn, probabilities, scored, uniforms
from strop.rollout.native.speculation.propose import NO_TOKEN

_CHECK_STREAM = 0x2545F4914F6CDD1D
"""Whether a draft is kept follows other random numbers than what is drawn instead of it."""


@dataclass(frozen=True)
class KeptTokens:
    tokens: Tensor
    """[rows, ahead] sampled tokens, or known ones."""
    kept: Tensor
    """[rows, ahead] whether a token is part of the sequence from now on."""
    known: Tensor
    """[rows, ahead] whether the token was given, not sampled."""
    drafted: Tensor
    """[rows, ahead] whether there was a draft."""
    accepted: Tensor
    """[rows, ahead] whether the draft was sampled."""
    state: Tensor
    """[rows] the state afterwards."""
    gained: Tensor
    """[rows] tokens that the row is longer."""


def checked(
    rows: DecodeRows,
    index: Tensor,
    logits: Tensor,
    used: Features,
    longest: int,
    drafts: Tensor,
    chances: Tensor,
) -> SampledTokens:
    """The tokens after the newest token of each row and after each of its drafts [rows, ahead - 1], which
    were drawn from `chances` [rows, ahead - 1, vocabulary]. `index`: the row of each of `logits`."""
    fields = rows.fields
    ahead = drafts.shape[1] + 1
    length = fields["length"][index] + torch.arange(len(index), device=index.device) % ahead
    settings, penalised = rows.settings(index, length, logits, used, longest)
    wanted = probabilities(logits, settings, penalised)
    draft = F.pad(drafts, (0, 1), value=NO_TOKEN).flatten()
    given = F.pad(chances, (0, 0, 0, 1)).flatten(0, 1).where(draft[:, None] >= 0, 0)
    at = draft.clamp(min=0)[:, None]
    stream = fields["stream"][index]
    limit = uniforms(stream ^ _CHECK_STREAM, length) * given.gather(1, at)[:, 0]
    kept = (draft >= 0) & (limit < wanted.gather(1, at)[:, 0])
    rest = (wanted - given).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)
    tokens = torch.where(kept, draft, drawn(rest, uniforms(stream, length)))
    return scored(logits, tokens, settings)


def judge(fields: dict[str, Tensor], rows: Tensor, drafts: Tensor, sampled: SampledTokens) -> KeptTokens:
    """`fields`: those of DecodeRows; `drafts` [rows, ahead - 1]; `sampled` for rows x ahead positions. Tokens
    of a prefill by decode steps are known and count as accepted drafts."""
    count = len(rows)
    ahead = drafts.shape[1] + 1
    length = fields["length"][rows][:, None] + torch.arange(ahead, device=rows.device)
    columns = length.clamp(max=fields["tokens"].shape[1] - 1)
    known = length < fields["num_known"][rows][:, None]
    tokens = torch.where(known, fields["tokens"][rows[:, None], columns], sampled.tokens.view(count, ahead))
    valid = sampled.valid.view(count, ahead)
    stopped = (tokens[..., None] == fields["stops"][rows][:, None]).any(-1)
    after = torch.where(length + 1 >= fields["limit"][rows][:, None], LENGTH, RUNNING)
    after = torch.where(stopped, STOP, after)
    after = torch.where(known, RUNNING, after)
    after = torch.where(valid, after, ERROR)
    same = tokens[:, :-1] == drafts
    goes_on = (same & (after[:, :-1] == RUNNING)).cumprod(-1).bool()
    state = fields["state"][rows]
    running = (state == RUNNING)[:, None]
    reached = torch.cat([running, running & goes_on], 1)
    last = (reached.sum(-1) - 1).clamp(min=0)
    kept = reached & valid
    sampled_draft = reached[:, :-1] & same & (drafts >= 0) & ~known[:, :-1]
    return KeptTokens(
        tokens=tokens,
        kept=kept,
        known=known,
        drafted=running & (drafts >= 0) & ~known[:, :-1],
        accepted=sampled_draft,
        state=torch.where(running[:, 0], after.gather(1, last[:, None])[:, 0], state),
        gained=kept.sum(-1),
    )


def write(fields: dict[str, Tensor], rows: Tensor, found: KeptTokens, log_probs: Tensor) -> None:
    """The rows have the kept tokens from now on. `log_probs`: of the sampled tokens."""
    ahead = found.tokens.shape[1]
    columns = fields["length"][rows][:, None] + torch.arange(ahead, device=rows.device)
    columns = columns.clamp(max=fields["tokens"].shape[1] - 1)
    index = (rows[:, None], columns)
    new = found.kept & ~found.known
    fields["tokens"][index] = torch.where(new, found.tokens, fields["tokens"][index])
    old = fields["log_probs"][index]
    fields["log_probs"][index] = torch.where(new, log_probs.view_as(old), old)
    fields["state"][rows] = found.state
    fields["length"][rows] += found.gained
