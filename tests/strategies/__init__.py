"""Strategies: registry, exchanges, agreement with one process."""
