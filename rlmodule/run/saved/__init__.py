"""Weights that a run has saved or that lie in a folder: where they are, and what is done with them but training."""
