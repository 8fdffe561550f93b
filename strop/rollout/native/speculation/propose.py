"""Guesses the next tokens of a sequence: the tokens that followed where its last tokens occurred before.

The place with the longest match wins; among equal ones the latest, and the sequence itself is later than
earlier sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NO_TOKEN = -1
"""No draft; also what separates and pads earlier sequences."""
_NEVER = -2
"""Equal to no token and no separator."""


def propose(
    tokens: Tensor, lengths: Tensor, lines: Tensor, num_tokens: int, *, min_match: int, max_match: int
) -> Tensor:
    """Drafts [rows, num_tokens] of the tokens that follow; NO_TOKEN from where nothing is known.

    `tokens` [rows, any] holds sequences of `lengths` [rows]. `lines` [rows, any] holds earlier sequences of
    each row, with NO_TOKEN between them and as padding. At least `min_match` last tokens must be the same;
    more than `max_match` are not compared.
    """
    newest = newest_tokens(tokens, lengths, max_match)
    own_match, own_end = _best(_own_matches(tokens, lengths, newest))
    line_match, line_end = _best(_line_matches(lines, newest))
    ahead = torch.arange(num_tokens, device=tokens.device)
    # A match that overlaps the end repeats itself: its tokens follow again and again.
    period = (lengths - 1 - own_end).clamp(min=1)
    places = own_end[:, None] + 1 + ahead % period[:, None]
    own = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
    line = _following(lines, line_end, ahead)
    drafts = torch.where((own_match >= line_match)[:, None], own, line)
    found = torch.maximum(own_match, line_match) >= min_match
    return drafts.where(found[:, None], NO_TOKEN)


def newest_tokens(tokens: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last tokens of each row [rows, count], the newest first."""
    places = lengths[:, None] - 1 - torch.arange(count, device=tokens.device)
    return tokens.gather(1, places.clamp(min=0)).where(places >= 0, _NEVER)


def match_lengths(source: Tensor, newest: Tensor) -> Tensor:
    """For each place of `source`, how many tokens up to it are the newest ones, at most newest.shape[1]."""
    width = source.shape[1]
    run = torch.ones_like(source, dtype=torch.bool)
    total = torch.zeros_like(source, dtype=torch.int32)
    for i in range(newest.shape[1]):
        same = source == newest[:, i : i + 1]
        run = run & F.pad(same, (i, 0))[:, :width]
        total += run
    return total


def _own_matches(tokens: Tensor, lengths: Tensor, newest: Tensor) -> Tensor:
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return match_lengths(tokens, newest) * (columns < lengths[:, None] - 1)


def _line_matches(lines: Tensor, newest: Tensor) -> Tensor:
    continues = F.pad(lines[:, 1:] >= 0, (0, 1))
    return match_lengths(lines, newest) * continues


def _best(matches: Tensor) -> tuple[Tensor, Tensor]:
    """The longest match of each row, and the last place where it ends."""
    width = matches.shape[1]
    best = (matches.long() * width + torch.arange(width, device=matches.device)).amax(-1)
    return best // width, best % width


def _following(lines: Tensor, end: Tensor, ahead: Tensor) -> Tensor:
    """The tokens after these places, NO_TOKEN from the end of their sequence on."""
    width = lines.shape[1]
    places = end[:, None] + 1 + ahead
    taken = lines.gather(1, places.clamp(max=width - 1)).long()
    there = (taken >= 0) & (places < width)
    return taken.where(there.cumprod(-1).bool(), NO_TOKEN)
