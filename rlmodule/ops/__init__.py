"""Tensor maths: tensors in, tensors out; no ranks, no configuration, no logging."""
