"""How models are spread over processes: one file per backend, chosen by name. Reusable pieces live in ``parts/``."""
