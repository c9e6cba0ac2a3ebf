"""One optimizer step: update, token selection, reduction of metrics, preemption.

Leaves out Lightning (``module.py``).
"""
