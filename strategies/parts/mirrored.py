"""Exchanges of activations between ranks, differentiable: backward is an exchange as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def exchanged(forward: Collective, backward: Collective, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``forward`` of ``x``, whose gradient is ``backward`` of the gradient."""
    result: Tensor = _Exchanged.apply(forward, backward, x, group)  # type: ignore[no-untyped-call]
    return result


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Collective, backward: Collective, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.backward_exchange, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        return None, None, ctx.backward_exchange(grad, ctx.group), None


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x[r]`` to rank r; place r of the result is what rank r sent here."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def uneven_all_to_all(sent: Sequence[int], received: Sequence[int], x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[sum(sent), ...] -> [sum(received), ...]: the first ``sent[0]`` go to rank 0, the next to rank 1, and so on."""
    x = x.contiguous()
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x, list(received), list(sent), group=group)
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...] of each rank -> [ranks * n, ...], in rank order."""
    x = x.contiguous()
    out = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_single(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks * n, ...] -> [n, ...]: the sum over the ranks of what each has for this one."""
    x = x.contiguous()
    out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(out, x, group=group)
    return out
