"""Refuses what cannot work before a weight is loaded: one file per subject, the list of all checks in ``checks.py``.

Leaves out what one section can say of itself (its dataclass) and the reading of rows (``run/datasets.py``).
"""
