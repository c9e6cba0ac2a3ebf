"""Pure maths: tensors in, tensors out. No rank, no configuration, no logging."""
