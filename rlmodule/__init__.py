"""RL post-training of language models as a Lightning module; the numbers do not depend on how the work is cut."""

__version__ = "0.1.0"
