"""The proof of an engine's copy: what is compared, and that no sequence is scored twice."""

import pytest
import torch

from rlmodule.core.episodes import Probe
from rlmodule.core.errors import TrainingError
from rlmodule.experience.canary import Canary

PROMPT, SERVERS = (3, 1, 4, 1, 5), ("a", "b")


def policy_logprobs(ids):
    """[len - 1] of a made-up policy: a function of each token and of all before it."""
    return torch.tensor([-0.1 * sum(ids[: place + 1]) for place in range(1, len(ids))])


class Engine:
    """Two copies of the policy, each off by so much in what it draws and in what it is given."""

    promised_dtype, version = torch.float32, 7

    def __init__(self, drawn=0.0, given=0.0):
        self.off = {"drew": drawn, "was given": given}

    def probe(self):
        yield [self.probe_of(name, "drew", PROMPT, (9, 2, number)) for number, name in enumerate(SERVERS)]
        yield [self.probe_of(name, "was given", PROMPT[:1], PROMPT[1:]) for name in SERVERS]

    def probe_of(self, name, how, prompt, ids):
        scores = policy_logprobs((*prompt, *ids))[len(prompt) - 1 :]
        return Probe(f"{name} {how}", prompt, torch.tensor(ids), scores + self.off[how])

    def likely_stale(self):
        return "unchanged: the head"


def test_a_sequence_is_scored_once_in_one_pass():
    passes = []

    def score(probes):
        passes.append([(*probe.prompt_ids, *probe.token_ids.tolist()) for probe in probes])
        return [
            policy_logprobs(whole)[-len(probe.token_ids) :] for whole, probe in zip(passes[-1], probes, strict=True)
        ]

    found = Canary(score)(Engine())
    assert passes == [[(*PROMPT, 9, 2, 0), (*PROMPT, 9, 2, 1)]], "prompts are the begin of what was drawn after them"
    assert {source: agreement.tokens for source, agreement in found.items()} == {
        **{f"{name} drew": 3 for name in SERVERS},
        **{f"{name} was given": 4 for name in SERVERS},
    }
    assert all(agreement.largest < 1e-6 for agreement in found.values())


@pytest.mark.parametrize(("off", "source"), [({"drawn": 0.1}, "a drew"), ({"given": -0.1}, "a was given")])
def test_a_copy_that_is_off_in_either_part_ends_the_run(off, source):
    canary = Canary(lambda probes: [policy_logprobs((*p.prompt_ids, *p.token_ids.tolist())) for p in probes])
    canary(Engine())
    with pytest.raises(TrainingError, match=f"{source}: log-probabilities differ by 1.0e-01.*unchanged: the head"):
        canary(Engine(**off))


def test_a_part_that_says_nothing_is_passed_over():
    """At another temperature servers score no given tokens."""

    class Drawing(Engine):
        def probe(self):
            yield next(super().probe())
            yield []

    canary = Canary(lambda probes: [policy_logprobs((*p.prompt_ids, *p.token_ids.tolist())) for p in probes])
    assert set(canary(Drawing())) == {"a drew", "b drew"}
