"""The step of AdamW with moments of 8 bits. Every state is a tensor, so that checkpoints hold them as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlmodule.core.parameters import empty_states


class EightBitAdamW(Optimizer):
    """AdamW by bitsandbytes' kernels: those of 8 bits for weights whose states have scales, those of 32 for others.

    Args:
        groups: with ``weight_decay`` and EIGHT_BIT_FROM, the elements from which on moments have 8 bits.
        lr, betas, eps: as AdamW's.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        import bitsandbytes.functional as kernels

        if parameter not in self.state:
            self.state[parameter] = empty_states(group, parameter)
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1
        step, lr, eps, decay = int(state["step"]), float(group["lr"]), group["eps"], group["weight_decay"]
        if "exp_avg" in state:
            first, second = state["exp_avg"], state["exp_avg_sq"]
            kernels.optimizer_update_32bit(
                "adam", gradient, parameter, first, beta1, eps, step, lr, second, beta2, weight_decay=decay
            )
            return
        moments, scales = ([state[f"{name}_{of}"] for name in ("exp_avg", "exp_avg_sq")] for of in ("8bit", "scale"))
        kernels.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            parameter,
            *moments,
            beta1,
            beta2,
            0.0,
            0.0,
            eps,
            step,
            lr,
            *_maps(parameter.device),
            *scales,
            decay,
        )


@cache
def _maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """[256] float32 each: what the 8 bits of the first moment, which has a sign, and of the second mean."""
    import bitsandbytes.functional as kernels

    signed, unsigned = (kernels.create_dynamic_map(signed=signed).to(device) for signed in (True, False))
    return signed, unsigned
