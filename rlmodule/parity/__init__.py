"""Proof, on the user's own model and machine, that the numbers do not depend on how the work is cut."""
