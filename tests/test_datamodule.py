"""What a data module says of its iterations. How they are made is in ``experience/``, whole runs in ``run/``."""

import re
import warnings

import pytest

from tests.helpers.runs import rollouts, run_small

CUT = "nearly all responses of iteration"


def said(tmp_path, *overrides):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_small(tmp_path / "run", "trainer.max_epochs=2", *overrides)
    return [str(w.message) for w in caught if CUT in str(w.message)]


def test_a_run_whose_responses_are_nearly_all_cut_says_so_once(tmp_path):
    """T2A-26, T2B-01: what a wrong set of end tokens looks like."""
    [message] = said(tmp_path, "data.max_response_length=1")
    cut = [row["finish_reason"] == "length" for row in rollouts(tmp_path / "run")["iteration_000001.jsonl"]]
    assert message.startswith(f"{CUT} 1 ({sum(cut)} of {len(cut)}) were cut at rollout.max_response_length")
    assert "rollout.stop_token_ids or rollout.stop" in message


@pytest.mark.parametrize("key", ["rollout.stop_token_ids=[0,1,2,3,4,5,6,7,8,9]", "rollout.stop=[a,e,i,o,u]"])
def test_a_run_whose_responses_end_says_nothing(tmp_path, key):
    """Tokens and texts of the user's end them: shorter than before, and most by themselves."""
    assert not said(tmp_path, key, "data.max_response_length=64")
    text = key.startswith("rollout.stop=")
    for rows in rollouts(tmp_path / "run").values():
        for row in rows:
            if row["finish_reason"] == "stop" and row["response_ids"][-1] != 257:
                assert re.search("[aeiou]$", row["response"]) if text else row["response_ids"][-1] < 10
