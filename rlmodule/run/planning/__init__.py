"""What a run will need, computed without weights: memory, work, traffic, time; formulas in docs/planning.md.

Leaves out the run itself and what is refused (``run/preflight/``).
"""
