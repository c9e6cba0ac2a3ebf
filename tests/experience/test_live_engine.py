"""A rollout engine is built and started once, gets weights when they have changed, and is closed once."""

import pytest
import torch

from rlmodule.core.errors import TrainingError
from rlmodule.core.types import POLICY
from rlmodule.data.end_tokens import EndTokens
from rlmodule.experience.live_engine import LiveEngine
from rlmodule.records.run_directory import RunDirectory
from rlmodule.rollout.hf import HFEngine
from rlmodule.rollout.parts.sampling import Truncation
from rlmodule.run.run import Run
from strategies.registry import STRATEGIES
from tests.helpers.runs import SMALL, compose, run_small
from tests.helpers.tiny import single, tiny_policy
from tests.rollout.engines import TinyTokenizer, ask, engine_of, generate
from tests.rollout.test_hf import PROMPTS


class OwnCopy(HFEngine):
    """Samples from a copy of the policy that is filled by ``update_weights``, as an engine in another process does."""

    takes_weights = True

    def __init__(self):
        self.copy = tiny_policy(seed=9)
        mode = single({POLICY: self.copy}).generation_mode
        parts = (TinyTokenizer(), torch.device("cpu"), EndTokens((1,)), Truncation(), 1024)
        super().__init__(lambda: self.copy, lambda: mode(POLICY), *parts)
        self.calls = []

    def start(self):
        self.calls.append("start")

    def update_weights(self, weights, version):
        self.copy.lm.load_state_dict(dict(weights))
        self.calls.append(version)
        self.version = version

    def close(self):
        self.calls.append("close")


def test_an_engine_with_a_copy_is_given_the_weights_that_changed():
    policy, now, built = tiny_policy(), [0], []
    strategy = single({POLICY: policy})

    def build():
        built.append(OwnCopy())
        return built[-1]

    live = LiveEngine(build, lambda: strategy.full_weights(POLICY), lambda: now[0])
    assert not built, "not before it is needed"
    requests = [ask(prompt, i) for i, prompt in enumerate(PROMPTS)]
    first = generate(live(), requests)
    again = generate(live(), requests)
    with torch.no_grad():
        policy.lm.get_input_embeddings().weight.mul_(-1)
    now[0] = 3
    later = generate(live(), requests)
    live.close()
    live.close()
    assert built[0].calls == ["start", 0, 3, "close"]
    assert len(built) == 1
    for completions, version in ((first, 0), (again, 0), (later, 3)):
        assert {c.version for c in completions} == {version}
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    assert [c.token_ids.tolist() for c in later] == [
        c.token_ids.tolist() for c in generate(engine_of(policy), requests)
    ]
    assert [c.token_ids.tolist() for c in later] != [c.token_ids.tolist() for c in first]


def test_an_engine_without_a_copy_gathers_no_weights():
    def gathered():
        raise AssertionError("nothing reads them")

    live = LiveEngine(lambda: engine_of(tiny_policy()), gathered, lambda: 5)
    assert live().version == 5


@pytest.fixture
def life(monkeypatch):
    """What happens to engines: ``start``, ``close``, versions of weights, and g for a generate."""
    seen = []

    def noting(name, note):
        real = getattr(HFEngine, name)

        def noted(self, *args, **kwargs):
            seen.append(note(*args, **kwargs))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(HFEngine, name, noted)

    noting("start", lambda: "start")
    noting("close", lambda: "close")
    noting("update_weights", lambda weights, version: version)
    noting("generate", lambda requests: "g")
    return seen


@pytest.mark.filterwarnings("ignore")
def test_a_run_has_one_engine_from_its_first_iteration_to_its_end(life, tmp_path):
    """Responses, validation before the first update, and again after each iteration's updates."""
    run_small(tmp_path / "run", "callbacks.validation.every_n_iterations=1", "trainer.max_epochs=2")
    assert life == ["start", 0, "g", "g", 1, "g", "g", 2, "g", "close"]


@pytest.mark.filterwarnings("ignore")
def test_an_engine_is_closed_when_the_run_fails(life, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def score(**_):\n    raise ValueError('planned')\n")
    keys = [word for word in SMALL if not word.startswith("reward.")]
    node = compose(*keys, f"run_dir={tmp_path / 'run'}", "reward=function", f"reward.path={judge}:score")
    run = Run.read(node, RunDirectory(tmp_path / "run"), STRATEGIES)
    with pytest.raises(TrainingError, match="planned"):
        run.fit()
    assert life == ["start", 0, "g", "close"]
