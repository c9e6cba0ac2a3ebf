"""What old and reference log-probabilities cost beside the update, and which keys save them; in words, for plans.

Leaves out values and teachers.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmodule.algorithm.config import ROLLOUTS
from rlmodule.run.config import RunConfig

SHARE = 1 / 3  # of a pass over the samples: one of three matrix products


def scoring_in_words(config: RunConfig, steps: int) -> str:
    """One line; empty where nothing is scored.

    Args:
        config: of the run.
        steps: optimizer steps of an iteration.
    """
    passes = dict(_passes(config, steps)) if config.dataset == ROLLOUTS else {}
    if not passes:
        return ""
    share = SHARE * len(passes) / config.algorithm.ppo_epochs
    saved = "; ".join(how for how in passes.values() if how)
    words = f"{' and '.join(passes)}: {share:.2f} of the matrix products of an iteration's update"
    return f"{words} ({saved})" if saved else words


def _passes(config: RunConfig, steps: int) -> Iterator[tuple[str, str]]:
    """(what is scored, what saves it) of each pass over the samples."""
    algorithm, objective = config.algorithm, config.objective
    if objective.scores_old_logprob(steps):
        instead = "algorithm.old_logprob=rollout takes those of the sampling instead"
        yield "old log-probabilities", instead if config.sampling.draws_from_policy else ""
    if objective.needs_reference:
        keys = [key for key in ("use_kl_loss", "use_kl_in_reward") if getattr(algorithm, key)]
        saves = " ".join(f"algorithm.{key}=false" for key in keys)
        yield "reference", f"{saves} needs no reference" if keys else ""
