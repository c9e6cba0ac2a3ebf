"""Statistics over the entries under a mask and over the members of a group.

Masked entries are removed by selection, never multiplied by zero, so NaN and infinity among them are harmless. Sums
over ranks are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Spread, over the largest number, up to which numbers are equal but for rounding: parts of a reward that are added in
# another order, and the mean of a group, are off by a few units of 2^-53.
ROUNDING = 2.0**-48


def are_equal(smallest: Tensor, largest: Tensor) -> Tensor:
    """Whether float64 numbers, of which these are the smallest and the largest, differ by no more than rounding; bool.

    Dividing such a spread by itself, or by the mean of its squares, would make advantages of size 1 of nothing.
    """
    return largest - smallest <= ROUNDING * torch.maximum(largest.abs(), smallest.abs())


def select(x: Tensor, mask: Tensor) -> Tensor:
    """Entries under the mask as a flat tensor: ``[B, R]`` values and mask give the ``[N]`` loss tokens.

    Select before other operations: masked entries get gradient 0, but an operation before the selection with infinite
    slope at such an entry would turn that 0 into NaN.

    Args:
        x: [B, R] of any dtype.
        mask: [B, R] bool.

    Returns:
        [N] in row order, dtype of ``x``.
    """
    assert x.shape == mask.shape, f"a mask of shape {tuple(x.shape)} is expected, got {tuple(mask.shape)}"
    assert mask.dtype == torch.bool, f"a mask is bool, got {mask.dtype}"
    return x[mask]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the entries under the mask, over all dimensions or along ``dim``; 0 when there is none."""
    kept = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the entries under the mask, over all dimensions or along ``dim``; 0 when there is none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale the entries under the mask to mean 0 and unbiased variance 1; other entries keep their value.

    Args:
        x: float tensor of any shape.
        mask: bool, same shape.
        eps: added to the variance; entries that are all equal but for rounding become 0.

    Returns:
        Shape and dtype of ``x``; ``x`` itself when the mask has fewer than two entries, which have no variance.
    """
    valid = select(x, mask).double()
    if valid.numel() < 2:
        return x
    if bool(are_equal(*valid.aminmax())):  # exact zeros, not rounding noise times 1 / sqrt(eps)
        return torch.where(mask, torch.zeros_like(x), x)
    valid = valid - valid[0]  # so that a large mean loses no digits
    scale = (valid.var(unbiased=True) + eps).rsqrt()
    whitened = torch.zeros_like(x).masked_scatter_(mask, ((valid - valid.mean()) * scale).to(x.dtype))
    return torch.where(mask, whitened, x)


def whiten_by_tokens(x: Tensor, tokens: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """``whiten`` a value per response as if it were repeated on each of the response's tokens.

    Args:
        x: [B] float.
        tokens: [B] int64, tokens of each response.
        mask: [B] bool, responses that are included; the others become 0.
        eps: added to the variance.

    Returns:
        [B] float64; not whitened when fewer than two tokens are included.
    """
    value = torch.where(mask, x.double(), 0.0)
    weight = torch.where(mask, tokens, 0).double()
    count = weight.sum()
    if count < 2:
        return value
    if bool(are_equal(*value[weight > 0].aminmax())):
        return torch.zeros_like(value)
    value = value - value[weight > 0][0]  # as in ``whiten``
    centred = value - (value * weight).sum() / count
    scale = ((centred.square() * weight).sum() / (count - 1) + eps).rsqrt()
    return torch.where(mask, centred * scale, 0.0)


def place_at_end(score: Tensor, length: Tensor, width: int) -> Tensor:
    """Put the score of each response on its last token, which is found by length.

    Args:
        score: [B] float.
        length: [B] int64, response tokens, at most ``width``; the score of a response of length 0 is dropped.
        width: R, columns of the result.

    Returns:
        [B, R], dtype of ``score``, zero elsewhere.
    """
    assert score.shape == length.shape, "one length per score"
    assert bool((length <= width).all()), f"a response is longer than {width}"
    is_last = torch.arange(width, device=length.device) == (length - 1).unsqueeze(1)  # [B, R]
    return torch.where(is_last, score.unsqueeze(1), torch.zeros((), dtype=score.dtype, device=score.device))


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """Statistics of each response's group over its valid members, float64.

    They are kept of each group: with a million responses, what every member knows of its group takes the memory.

    Args:
        group: [B] int64 number of each response's group, 0 to G-1.
        counts: [G] valid members.
        means: [G] mean; 0 when no member is valid.
        stds: [G] unbiased standard deviation; 0 when fewer than two members are valid.
        are_equal: [G] bool, all valid members are equal but for rounding (also when there are fewer than two).
    """

    group: Tensor
    counts: Tensor
    means: Tensor
    stds: Tensor
    are_equal: Tensor

    @property
    def count(self) -> Tensor:
        """[B] valid members of the group of each."""
        return self.counts[self.group]

    @property
    def mean(self) -> Tensor:
        """[B] their mean."""
        return self.means[self.group]

    @property
    def std(self) -> Tensor:
        """[B] their unbiased standard deviation."""
        return self.stds[self.group]

    @property
    def has_zero_std(self) -> Tensor:
        """[B] bool, whether they are all equal but for rounding."""
        return self.are_equal[self.group]


def group_statistics(value: Tensor, group: Tensor, valid: Tensor) -> GroupStatistics:
    """Statistics of each group over its valid members; two passes, so that a large mean loses no digits.

    Args:
        value: [B] float; entries that are not valid may be anything, NaN included.
        group: [B] int64, equal values form one group, in any order and with any numbering.
        valid: [B] bool.
    """
    assert value.shape == group.shape == valid.shape, "one group and one flag per value"
    kept = torch.where(valid, value.double(), 0.0)  # [B]
    # [B], 0 to G-1; groups that come one after the other, as they do in an iteration, need no sorting.
    is_sorted = bool((group[1:] >= group[:-1]).all())
    index = (torch.unique_consecutive if is_sorted else torch.unique)(group, return_inverse=True)[1]
    num_groups = int(index.max()) + 1 if len(index) else 0
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=value.device)  # [G]

    count = zeros.index_add(0, index, valid.double())
    mean = zeros.index_add(0, index, kept) / count.clamp(min=1)
    square = mean[index].sub_(kept).square_().masked_fill_(~valid, 0.0)  # [B] of the deviation from the mean
    std = (zeros.index_add(0, index, square) / (count - 1).clamp(min=1)).sqrt()
    del square

    # Largest and smallest are exact, while the std of equal decimals such as 0.1 is rounding noise, not 0.
    infinity = torch.full_like(zeros, torch.inf)
    largest = (-infinity).scatter_reduce(0, index, torch.where(valid, kept, -torch.inf), "amax")
    smallest = infinity.scatter_reduce(0, index, torch.where(valid, kept, torch.inf), "amin")
    return GroupStatistics(index, count, mean, std, are_equal(smallest, largest))
