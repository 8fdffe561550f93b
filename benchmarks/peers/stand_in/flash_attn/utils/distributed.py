"""Named by an import of OpenRLHF, called with ring attention only."""

from __future__ import annotations

import torch
from torch.distributed.nn.functional import all_gather as gather


def all_gather(tensor: torch.Tensor, process_group: torch.distributed.ProcessGroup) -> torch.Tensor:
    return torch.cat(gather(tensor, group=process_group))
