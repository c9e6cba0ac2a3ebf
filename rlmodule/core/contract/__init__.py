"""The interfaces of what can be exchanged: strategy, loss, advantage, reward, environment, rollout engine.

The protocol belongs to its user: ``strategies/`` implements Strategy, and ``rlmodule`` never imports ``strategies``.
Every name is imported from here; each file has the interfaces of one subject and can be read alone.
Leaves out every implementation, and interfaces within one package.
"""

from rlmodule.core.contract.environment import (
    AnswerReward,
    DemonstratedEnvironment,
    Environment,
    EnvironmentSource,
    Episode,
    Evaluator,
    MultiTurnEnvironment,
    Reward,
    SeparateReward,
    ServedReward,
    TemplateEnvironment,
)
from rlmodule.core.contract.objective import (
    Advantage,
    JointObjective,
    Loss,
    MicroBatchLoss,
    ModelObjective,
    SelectingLoss,
    TokenObjective,
    TopTokensLoss,
    ValueAdvantage,
    ValueObjective,
)
from rlmodule.core.contract.ranks import Collectives, SequenceRanks, VocabularyRanks
from rlmodule.core.contract.rollout import ConcurrentEngine, ProvableEngine, Responder, RolloutEngine
from rlmodule.core.contract.strategy import (
    LANGUAGE_MODEL,
    POLICY_VALUE,
    VALUE_MODEL,
    Backward,
    ModelSpec,
    SaveLater,
    Snapshot,
    StoredWeights,
    Strategy,
    StrategyClass,
)

__all__ = [
    "LANGUAGE_MODEL",
    "POLICY_VALUE",
    "VALUE_MODEL",
    "Advantage",
    "AnswerReward",
    "Backward",
    "Collectives",
    "ConcurrentEngine",
    "DemonstratedEnvironment",
    "Environment",
    "EnvironmentSource",
    "Episode",
    "Evaluator",
    "JointObjective",
    "Loss",
    "MicroBatchLoss",
    "ModelObjective",
    "ModelSpec",
    "MultiTurnEnvironment",
    "ProvableEngine",
    "Responder",
    "Reward",
    "RolloutEngine",
    "SaveLater",
    "SelectingLoss",
    "SeparateReward",
    "SequenceRanks",
    "ServedReward",
    "Snapshot",
    "StoredWeights",
    "Strategy",
    "StrategyClass",
    "TemplateEnvironment",
    "TokenObjective",
    "TopTokensLoss",
    "ValueAdvantage",
    "ValueObjective",
    "VocabularyRanks",
]
