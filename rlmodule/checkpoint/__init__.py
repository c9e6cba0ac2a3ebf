"""Checkpoints: folders that are whole or do not count, and the form in which samples are kept. Nothing is pickled."""
