"""Parameters that every rank holds whole, beside a model that is cut over ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import keep_for_a_while, naming_collectives
from .peers import Peers


class Carried:
    """Of `parameters` those that are trained: no library averages their gradients. `peers` hold
    them, and talk on `device`."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], peers: Peers, device: torch.device
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.peers, self.device = peers, device

    def average(self, lowest: torch.dtype) -> None:
        """Their gradients over feeders, added up in that dtype or a wider one; of those that have
        none on a rank, a zero counts, and where no rank has any there is none."""
        if not self.parameters or self.peers.size == 1:
            return
        dtypes = [parameter.dtype for parameter in self.parameters]
        dtype = functools.reduce(torch.promote_types, dtypes, lowest)
        present = [float(parameter.grad is not None) for parameter in self.parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat(
            [
                torch.tensor(present, dtype=dtype, device=self.device),
                *(grad.detach().reshape(-1).to(dtype) for grad in grads),
            ]
        )
        with naming_collectives("averaging gradients of what is carried whole", self.peers.rank):
            dist.all_reduce(keep_for_a_while(flat), group=self.peers.group)
        found, *parts = torch.split(flat, [len(grads), *(grad.numel() for grad in grads)])
        self._take(found.tolist(), [part / self.peers.size for part in parts])

    def _take(self, found: Sequence[float], means: Sequence[Tensor]) -> None:
        for parameter, ranks, mean in zip(self.parameters, found, means, strict=True):
            parameter.grad = mean.view_as(parameter).to(parameter.dtype) if ranks else None
