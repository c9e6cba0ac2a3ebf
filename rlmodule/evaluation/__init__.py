"""What models are asked between updates, of rows that are never trained on: answers, pairs ranked, held-out loss.

Leaves out when (``callbacks/validation.py``) and where the rows come from (``run/datasets.py``).
"""

VALIDATION = "val"  # first part of the names of everything that is measured on held-out rows
