"""What a run leaves behind: metrics log, run directory, summaries.

Leaves out who shows it (``loggers/``, ``callbacks/``).
"""
