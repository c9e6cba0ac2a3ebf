"""What a run leaves behind: metrics log, run directory, summaries; and what a logger can show of it.

Leaves out the loggers and callbacks that show it (``loggers/``, ``callbacks/``).
"""
