"""Gradients added up over a process group, many tensors in one exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_NUMEL = 50_000_000  # elements of one exchange


def fill_missing(parameters: Sequence[nn.Parameter]) -> None:
    """Zeros for parameters that no token of this process has reached, so that every process exchanges the same ones."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def sum_over(
    gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device, *, factor: float = 1.0
) -> None:
    """Replace each by ``factor`` times its sum over the group.

    Args:
        gradients: in the same order and of the same shapes on every process of the group.
        group: the processes.
        device: of tensors that its backend sends.
        factor: of the sum; 1 over the size of the group gives the mean.
    """
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).to(device)
        dist.all_reduce(flat, group=group)
        flat.mul_(factor)
        for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        if not buckets or gradient.numel() > room:
            buckets.append([])
            room = BUCKET_NUMEL
        buckets[-1].append(gradient)
        room -= gradient.numel()
    return buckets
