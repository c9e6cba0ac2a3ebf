"""Every estimator against a second telling of its formula: plain Python over dictionaries, one response at a time."""

import math
import random
from collections import defaultdict
from itertools import chain
from statistics import mean, stdev

import pytest
import torch

from rlmodule.advantages import ADVANTAGES
from rlmodule.advantages.gae import GAE
from rlmodule.advantages.gdpo import GDPO
from rlmodule.advantages.grpo import GRPO
from rlmodule.advantages.reinforce_pp import ReinforcePP
from rlmodule.core.types import AdvantageInputs, TokenValues


class Told:
    """Responses as plain numbers: reward, group, length, parts, baseline."""

    def __init__(self, seed):
        rng = random.Random(seed)
        count = 14
        self.group = [rng.choice([3, 5, 8, 13]) for _ in range(count)]
        self.reward = [rng.choice([0.0, 0.5, 1.0, 0.1]) for _ in range(count)]
        self.reward[rng.randrange(count)] = math.nan
        self.length = [rng.randint(1, 6) for _ in range(count)]
        self.format = [rng.choice([0.0, 1.0, math.nan]) for _ in range(count)]
        self.baseline = [rng.choice([0.0, 0.25]) for _ in range(count)]
        self.value, self.penalty = ([[rng.gauss(0, 1) for _ in range(n)] for n in self.length] for _ in range(2))
        self.energy = [[rng.uniform(0, 2) for _ in range(n)] for n in self.length]
        self.next_value = [rng.choice([0.0, 0.5]) for _ in range(count)]
        self.weight = [[rng.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(n)] for n in self.length]

    @property
    def inputs(self):
        def of(values):
            return torch.tensor(list(values), dtype=torch.float64)

        return AdvantageInputs(
            reward=of(self.reward),
            group=torch.tensor(self.group),
            loss_tokens=torch.tensor(self.length),
            parts={"answer": of(self.reward), "format": of(self.format)},
            baseline=of(self.baseline),
            tokens=TokenValues(of(chain(*self.value)), of(chain(*self.penalty)), of(self.next_value)),
            energy=of(chain(*self.energy)),
            rollout_weight=of(chain(*self.weight)),
        )

    def scored(self):
        return [i for i, r in enumerate(self.reward) if not math.isnan(r)]

    def groups(self, value):
        members = defaultdict(list)
        for i in self.scored():
            if not math.isnan(value[i]):
                members[self.group[i]].append(i)
        return members.values()

    def has_reward_variance(self, value=None):
        value = value or self.reward
        return [g for g in self.groups(value) if len({value[i] for i in g}) > 1]


def by_group(formula):
    """An estimator from ``formula(rewards of a group, lengths, place) -> advantage``; flat groups give 0."""

    def reference(told):
        out = [0.0] * len(told.reward)
        for members in told.has_reward_variance():
            rewards, lengths = [told.reward[i] for i in members], [told.length[i] for i in members]
            for place, i in enumerate(members):
                out[i] = formula(rewards, lengths, place)
        return out

    return reference


def passk(rewards, lengths, place):
    first, second = sorted(rewards, reverse=True)[:2]
    return (first - second) / (stdev(rewards) + 1e-6) if rewards[place] == first else 0.0


def gpg(told):
    alpha = len(told.scored()) / max(sum(len(g) for g in told.has_reward_variance()), 1)
    return [alpha * a for a in by_group(lambda r, n, i: r[i] - mean(r))(told)]


def batch_std(told):
    whole = stdev([told.reward[i] for i in told.scored()])
    return [a / (whole + 1e-6) for a in by_group(lambda r, n, i: r[i] - mean(r))(told)]


def whitened(values, counts):
    """Values that stand on ``counts`` tokens each, against the mean and deviation of all tokens."""
    tokens = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
    return [(v - mean(tokens)) / math.sqrt(stdev(tokens) ** 2 + 1e-8) for v in values]


def reinforce_pp_baseline(told):
    centred = by_group(lambda r, n, i: r[i] - mean(r))(told)
    at = told.scored()
    scaled = dict(zip(at, whitened([centred[i] for i in at], [told.length[i] for i in at]), strict=True))
    tells = {i for g in told.has_reward_variance() for i in g}
    return [scaled[i] if i in tells else 0.0 for i in range(len(told.reward))]


def reinforce_pp(told, gamma=1.0):
    returns = [[gamma ** (n - 1 - t) * r for t in range(n)] for r, n in zip(told.reward, told.length, strict=True)]
    tokens = [v for i in told.scored() for v in returns[i]]
    scale = math.sqrt(stdev(tokens) ** 2 + 1e-8)
    return [0.0 if math.isnan(v) else (v - mean(tokens)) / scale for response in returns for v in response]


def gdpo(told, weights=None):
    weights = weights or {"answer": 1.0, "format": 1.0}
    total = [0.0] * len(told.reward)
    for name, weight in weights.items():
        value = {"answer": told.reward, "format": told.format}[name]
        for members in told.has_reward_variance(value):
            values = [value[i] for i in members]
            for i in members:
                total[i] += weight * (value[i] - mean(values)) / (stdev(values) + 1e-6)
    whole = stdev([total[i] for i in told.scored()])
    return [a / (whole + 1e-6) for a in total]


def remax(told):
    return [0.0 if math.isnan(r) else r - b for r, b in zip(told.reward, told.baseline, strict=True)]


def surprises(told, i, gamma, bootstrap):
    """delta of each token of response i: what it earned and what is expected next, less what was expected."""
    value = told.value[i]
    earned = [-c for c in told.penalty[i]]
    earned[-1] += told.reward[i]
    after = [*value[1:], told.next_value[i] if bootstrap else 0.0]
    return [r + gamma * n - v for r, n, v in zip(earned, after, value, strict=True)]


def unwhitened_gae(told, i, gamma=1.0, lam=0.95, bootstrap=False):
    delta = surprises(told, i, gamma, bootstrap)
    return [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]


def gae(told, **config):
    tokens = [a for i in told.scored() for a in unwhitened_gae(told, i, **config)]
    scale = math.sqrt(stdev(tokens) ** 2 + 1e-8)
    out = []
    for i, n in enumerate(told.length):
        scored = not math.isnan(told.reward[i])
        out += [(a - mean(tokens)) / scale for a in unwhitened_gae(told, i, **config)] if scored else [0.0] * n
    return out


def optimal_token_baseline(told, power=0):
    """Token by token: who of the group has said as much, and how much of the gradient each has gathered so far."""
    out = [[0.0] * n for n in told.length]
    for members in told.has_reward_variance():
        for t in range(max(told.length[i] for i in members)):
            alive = [i for i in members if told.length[i] > t]
            weights = [
                sum(w**power * e for w, e in zip(told.weight[i][: t + 1], told.energy[i], strict=False)) + 1e-8
                for i in alive
            ]
            baseline = sum(w * told.reward[i] for w, i in zip(weights, alive, strict=True)) / sum(weights)
            for i in alive:
                out[i][t] = told.reward[i] - baseline if len(alive) > 1 else 0.0
    return list(chain(*out))


REFERENCES = {
    "weighted_optimal_token_baseline": lambda told: optimal_token_baseline(told, 2),
    "optimal_token_baseline": optimal_token_baseline,
    "gae": gae,
    "grpo": by_group(lambda r, n, i: (r[i] - mean(r)) / (stdev(r) + 1e-6)),
    "grpo_passk": by_group(passk),
    "rloo": by_group(lambda r, n, i: r[i] - mean(r[:i] + r[i + 1 :])),
    "opo": by_group(lambda r, n, i: r[i] - sum(a * b for a, b in zip(r, n, strict=True)) / sum(n)),
    "gpg": gpg,
    "maxrl": by_group(lambda r, n, i: (r[i] - mean(r)) / (mean(r) + 1e-6)),
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "reinforce_pp": reinforce_pp,
    "gdpo": gdpo,
    "remax": remax,
}
VARIANTS = {
    "gae discounted": (GAE(gamma=0.9, lam=0.5), lambda told: gae(told, gamma=0.9, lam=0.5)),
    "gae bootstrapped": (GAE(bootstrap_truncated=True), lambda told: gae(told, bootstrap=True)),
    "grpo by batch": (GRPO(std_over="batch"), batch_std),
    "dr_grpo": (GRPO(normalize_by_std=False), by_group(lambda r, n, i: r[i] - mean(r))),
    "reinforce_pp discounted": (ReinforcePP(gamma=0.5), lambda told: reinforce_pp(told, 0.5)),
    "gdpo weighted": (GDPO(weights={"format": 0.2}), lambda told: gdpo(told, {"format": 0.2})),
}


@pytest.mark.parametrize("name", [*REFERENCES, *VARIANTS])
def test_an_estimator_is_its_reference(name):
    estimator, reference = VARIANTS[name] if name in VARIANTS else (ADVANTAGES.get(name)(), REFERENCES[name])
    for seed in range(8):
        told = Told(seed)
        assert estimator(told.inputs).tolist() == pytest.approx(reference(told), rel=1e-9, abs=1e-12)


def test_returns_are_values_plus_advantages_before_whitening():
    told = Told(0)
    expected = []
    for i, values in enumerate(told.value):
        scored = not math.isnan(told.reward[i])
        expected += [v + a if scored else 0.0 for v, a in zip(values, unwhitened_gae(told, i), strict=True)]
    assert GAE().returns(told.inputs).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert GAE(whiten=False).returns(told.inputs).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
