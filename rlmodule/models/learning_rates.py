"""Learning rates that fit a model, by its size and by what is trained: at a random one's rate a published one forgets.

Where the numbers come from:

- full training by reinforcement: 1e-6, that of verl's GRPO examples from 0.5B to 32B and the default of TRL's
  GRPOConfig; models below 1B bear 2e-6.
- full supervised training: 1e-5, between Tulu 3 (5e-6, arXiv:2411.15124) and the default of TRL's SFTConfig (2e-5).
- a separate value model: 1e-5, that of verl's PPO examples (ten times the policy's).
- adapters: at least ten times the rate of full training ("LoRA Without Regret", Thinking Machines, 2025, for supervised
  training and reinforcement alike), less the larger the model (tinker-cookbook's ``hyperparam_utils``, which lowers it
  with the hidden size); 2e-4 for supervised training (TRL's guide to peft).
- random weights: those with which the built-in example learns.

With 2e-4 GRPO on all weights took SmolLM2-135M from a held-out accuracy of 0.438 to 0 in four iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

BILLION = 10**9
FULL_BELOW_A_BILLION, FULL = 2e-6, 1e-6
# Parameters below which a rate holds -> that rate of adapters.
ADAPTERS = ((1 * BILLION, 1e-4), (5 * BILLION, 5e-5), (15 * BILLION, 2e-5))
ADAPTERS_OF_LARGE = 1e-5


@dataclass(frozen=True)
class LearningRates:
    """Peak learning rates of one model.

    Args:
        full: all weights, by reinforcement or preferences.
        sft: all weights, by demonstrations; also of a reward model.
        value: a separate value model.
        lora: adapters, by reinforcement or preferences.
        lora_sft: adapters, by demonstrations.
    """

    full: float
    sft: float
    value: float
    lora: float
    lora_sft: float


OF_RANDOM_WEIGHTS = LearningRates(full=2e-4, sft=2e-4, value=1e-3, lora=2e-4, lora_sft=2e-4)


def rates_of_size(num_parameters: int) -> LearningRates:
    """For a model with trained weights."""
    return LearningRates(
        full=FULL_BELOW_A_BILLION if num_parameters < BILLION else FULL,
        sft=1e-5,
        value=1e-5,
        lora=next((rate for below, rate in ADAPTERS if num_parameters < below), ADAPTERS_OF_LARGE),
        lora_sft=2e-4,
    )
