"""Episodes of several turns over the in-process engine: what was shown is masked, later turns draw other numbers, and
neither the ranks nor the size of a batch have a say.

The environment is defined here: it asks for a second try, and then gives a reward of its own.
"""

import time
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch

from rlmodule.batching.collate import pack_rows
from rlmodule.core.episodes import Completion, Done, Observation
from rlmodule.core.errors import DataError
from rlmodule.core.layout import Layout
from rlmodule.core.types import Prompt, RewardResult, StepTotals, TrainingSample
from rlmodule.data.chat import ChatFormat
from rlmodule.data.end_tokens import EndTokens
from rlmodule.data.stream import PromptStream
from rlmodule.environments.parts.single_turn import SingleTurnEpisode
from rlmodule.evaluation.prompts import PromptEvaluator
from rlmodule.experience.episodes import EpisodeRequest, EpisodeRunner, EpisodesConfig
from rlmodule.experience.failures import reward_counts
from rlmodule.experience.gathering import gather_sample_info
from rlmodule.experience.iteration_metrics import length_metrics, reward_metrics
from rlmodule.experience.sources import RolloutSource, RowSampler
from rlmodule.experience.timer import Timer
from rlmodule.models.byte_tokenizer import byte_tokenizer
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import current_layout, single, tiny_policy, wrap_here
from tests.rollout.engines import engine_of, generate

TOKENIZER = byte_tokenizer()
CHAT = ChatFormat(TOKENIZER)
END, USER, ASSISTANT = 257, 258, 259
LIMIT = 24  # tokens of a sample after its prompt
SHOWN = (USER, *b"again", ASSISTANT)  # an end token comes first where the response has none
ROWS = [Prompt(row=i, ids=(USER, *f"q{i}".encode(), ASSISTANT), text=f"q{i}", source="test") for i in range(5)]


@dataclass
class TwoTries:
    """Every second row has one turn; the others are asked again. The reward is the number of tokens of the last try."""

    row: Prompt
    tries: list[Completion] = field(default_factory=list)

    @property
    def prompt(self) -> Observation:
        return Observation(ids=self.row.ids)

    def reply(self, completion: Completion) -> Observation | Done:
        self.tries.append(completion)
        if len(self.tries) == 2 or self.row.row % 2:
            return Done(RewardResult(float(len(completion.token_ids)), {"tries": float(len(self.tries))}))
        return Observation(messages=[{"role": "user", "content": "again"}])

    def cut(self) -> Done:
        return Done(RewardResult(-1.0))


def policy():
    """Bent towards the end token, so that it speaks less than the limit."""
    made = tiny_policy(vocab_size=260, tie_word_embeddings=False)
    with torch.no_grad():
        made.lm.get_output_embeddings().weight[END] *= 6
    return made


def engine(strategy=None, ends=(END,), **keys):
    return engine_of(policy(), tokenizer=TOKENIZER, ends=EndTokens(ends), strategy=strategy, **keys)


def runner(start=TwoTries, limit=LIMIT, longest_prompt=8):
    return EpisodeRunner(start, CHAT, longest_prompt, limit)


def requests(count=4):
    return [EpisodeRequest(row, row.row * count + n, row.row, seed=3) for row in ROWS for n in range(count)]


def plain(finished):
    """Everything about finished episodes that can be compared, by sample id."""
    return {
        f.sample.sample_id: (
            f.sample.response_ids.tolist(),
            f.sample.loss_mask.tolist(),
            f.sample.finish_reason,
            f.sample.text,
            None if f.reward is None else f.reward.value,
        )
        for f in finished
    }


@pytest.fixture(scope="module")
def finished():
    return runner().run(engine(), requests())


def test_samples_come_in_the_order_they_were_asked_for(finished):
    asked = requests()
    assert [(f.sample.sample_id, f.sample.group_id) for f in finished] == [(r.sample_id, r.group_id) for r in asked]
    assert [f.sample.prompt for f in finished] == [r.row for r in asked]


def test_what_was_shown_lies_between_the_turns_and_is_not_trained_on(finished):
    """Ids are those that were sampled and those of the template, end to end; loss mask False on the latter alone."""
    both = 0
    for f in finished:
        ids, mask = f.sample.response_ids.tolist(), f.sample.loss_mask.tolist()
        shown = [token for token, is_sampled in zip(ids, mask, strict=True) if not is_sampled]
        assert f.sample.rollout_logprob[~f.sample.loss_mask].eq(0).all()
        assert f.sample.rollout_logprob[f.sample.loss_mask].lt(0).all()
        if not shown:
            continue
        both += 1
        first = mask.index(False)
        assert tuple(shown) == SHOWN
        assert tuple(ids[first : first + len(SHOWN)]) == SHOWN, "in one piece"
        assert ids[first - 1] == END, "only a turn that has ended is followed by another"
        assert f.sample.prompt.row % 2 == 0
        assert f.reward.parts == {"tries": 2.0}
    assert both >= 4


def test_the_recorded_log_probabilities_are_those_of_the_whole_episode(finished):
    """The second turn was drawn with everything before it as context."""
    rows = [TrainingSample(f.sample) for f in finished]
    with torch.no_grad():
        scored = policy()(pack_rows(rows, StepTotals(1000, len(rows)))).logprob
    recorded = torch.cat([f.sample.rollout_logprob[f.sample.loss_mask] for f in finished])
    torch.testing.assert_close(scored, recorded, rtol=0, atol=1e-5)


def noting(engine, batches):
    """The engine, which notes the requests that it lets in together."""
    prefill = engine._prefill

    def noted(batch):
        batches.append(batch)
        return prefill(batch)

    engine._prefill = noted
    return engine


def test_the_second_turn_draws_other_random_numbers_than_the_first(finished):
    """Its positions go on where the first turn and what was shown after it end; at position 0 it would draw others."""
    batches, again = [], engine()
    assert plain(runner().run(noting(engine(), batches), requests())) == plain(finished)
    found = {f.sample.sample_id: f.sample for f in finished}
    later = [r for batch in batches for r in batch if r.first_position]
    assert len(later) >= 4
    for r in later:
        sample = found[r.sample_id]
        assert r.prompt_ids == (*sample.prompt.ids, *sample.response_ids[: r.first_position].tolist())
        assert r.max_tokens == LIMIT - r.first_position
        assert sample.loss_mask[r.first_position :].all()
    from_0 = generate(again, [replace(r, first_position=0) for r in later])
    turns = [found[r.sample_id].response_ids[r.first_position :].tolist() for r in later]
    different = sum(c.token_ids.tolist() != turn for c, turn in zip(from_0, turns, strict=True))
    assert different > len(later) / 2


def test_no_sample_is_longer_than_the_limit():
    """What is shown counts as well; an episode without room for another response ends as one that was cut."""
    for limit in (1, 6, 9, 12):
        for f in runner(limit=limit).run(engine(), requests()):
            ids, mask = f.sample.response_ids.tolist(), f.sample.loss_mask.tolist()
            assert len(ids) <= limit
            assert mask[-1], "nothing is shown that nobody responds to"
            ended = ids[-1] == END and (f.sample.prompt.row % 2 == 1 or False in mask)
            assert f.sample.finish_reason == ("stop" if ended else "length")
            assert (f.reward.value == -1) == (False not in mask and f.sample.prompt.row % 2 == 0), (
                "asked when it is cut"
            )


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_size_of_a_batch_changes_nothing_though_turns_mix(finished, size):
    batches = []
    assert plain(runner().run(noting(engine(max_batch_size=size), batches), requests())) == plain(finished)
    turns = [{r.first_position > 0 for r in batch} for batch in batches]
    assert size == 1 or {True, False} in turns, "first and second turns side by side"


def test_other_episodes_beside_it_change_nothing(finished):
    asked = requests()
    apart = [f for part in (asked[::2], asked[1::2]) for f in runner().run(engine(), part)]
    assert plain(apart) == plain(finished)


def collected(rank, engine_size=1024):
    """This rank's samples of two iterations."""
    strategy = wrap_here({"policy": policy()})
    made = engine(strategy, max_batch_size=engine_size)
    draw = RowSampler(PromptStream(len(ROWS), seed=0), 3, lambda: strategy.layout)
    source = RolloutSource(ROWS, draw, 4, runner(), lambda: made, None, seed=3, greedy_baseline=True)
    found = [s for iteration in range(2) for s in source.collect(iteration, Timer())]
    return {
        s.sample.sample_id: (s.sample.response_ids.tolist(), s.sample.loss_mask.tolist(), s.score.value, s.baseline)
        for s in found
    }


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_do_not_depend_on_how_rows_are_spread_over_ranks(world_size):
    """The environment's rewards need no reward function; the greedy response has its own, from its own last turn."""
    alone = collected(0)
    assert len(alone) == 2 * 3 * 4
    assert any(False in mask for _, mask, _, _ in alone.values())
    assert all(baseline is not None for *_, baseline in alone.values())
    shares = run_on_ranks(world_size, partial(collected, engine_size=2))
    assert sum(map(len, shares)) == len(alone)
    assert {key: value for share in shares for key, value in share.items()} == alone


def test_a_reward_function_is_asked_about_those_without_a_reward_of_their_own():
    """All at once, and in order; the scores go to the right samples."""
    asked = []

    @dataclass
    class HalfScored(TwoTries):
        def reply(self, completion):
            return Done(RewardResult(-1.0) if self.row.row % 2 else None)

    def reward(samples):
        asked.append([s.sample_id for s in samples])
        return [RewardResult(float(s.sample_id)) for s in samples]

    draw = RowSampler(PromptStream(len(ROWS), seed=0, shuffle=False), 5, Layout)
    source = RolloutSource(ROWS, draw, 2, runner(HalfScored), engine, reward, seed=0)
    values = {s.sample.sample_id: s.score.value for s in source.collect(0, Timer())}
    assert asked == [[0, 1, 4, 5, 8, 9]]
    assert values == {i: -1.0 if i // 2 % 2 else float(i) for i in range(10)}


def test_held_out_rows_are_episodes_too():
    strategy = single({"policy": policy()})
    made = engine(strategy)
    evaluator = PromptEvaluator({"": ROWS}, runner(), lambda: made, None, strategy)
    expected = [
        f.reward.value for f in runner().run(made, [EpisodeRequest(r, r.row, r.row, greedy=True) for r in ROWS])
    ]
    assert evaluator().metrics["val/reward/mean"] == pytest.approx(sum(expected) / len(ROWS))


# ---- what an environment may show


@dataclass(frozen=True)
class Opening(SingleTurnEpisode):
    """Its prompt is made when the episode starts."""

    @property
    def prompt(self):
        return Observation(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": self.row.text}])


def test_a_prompt_may_be_messages_that_are_made_when_the_episode_starts():
    [f] = runner(Opening).run(engine(), [EpisodeRequest(ROWS[3], 0, 0)])
    assert f.sample.prompt.ids == (USER, *b"s", USER, *b"q3", ASSISTANT)
    assert (f.sample.prompt.row, f.sample.prompt.text) == (3, "q3")


def test_a_prompt_that_is_too_long_is_refused_by_its_row():
    with pytest.raises(DataError, match=r"row 4 of test: its prompt has 6 tokens, data\.max_prompt_length is 5"):
        runner(Opening, longest_prompt=5).run(engine(), [EpisodeRequest(ROWS[3], 0, 0)])


@dataclass
class Ids(TwoTries):
    """Shows token ids."""

    def reply(self, completion):
        reply = super().reply(completion)
        return reply if isinstance(reply, Done) else Observation(ids=(5, 6))


def test_observations_may_be_token_ids():
    shown = [f.sample.response_ids[~f.sample.loss_mask].tolist() for f in runner(Ids).run(engine(), requests())]
    assert [] in shown
    assert [5, 6] in shown
    assert len({tuple(s) for s in shown}) == 2


def test_a_turn_that_ended_otherwise_is_ended_for_the_template_first():
    """By another token or by a text: the template's own end token comes before what follows, and is not trained on."""
    other = engine(ends=(END, ord("a")))
    with torch.no_grad():
        other.policy().lm.get_output_embeddings().weight[ord("a")] *= 6
    ended = {END: 0, ord("a"): 0}
    for f in runner().run(other, requests()):
        mask = f.sample.loss_mask.tolist()
        if False in mask:
            last = int(f.sample.response_ids[mask.index(False) - 1])
            shown = tuple(f.sample.response_ids[~f.sample.loss_mask].tolist())
            assert shown == (SHOWN if last == END else (END, *SHOWN))
            ended[last] += 1
    assert all(ended.values()), ended


def test_what_the_template_cannot_say_is_refused_by_its_row():
    raw = EpisodeRunner(TwoTries, ChatFormat(TOKENIZER, template=False), 8, LIMIT)
    with pytest.raises(DataError, match="episode of row 1 of test: messages need a chat template"):
        raw.run(engine(), requests()[:4])


def test_a_sample_id_that_is_asked_for_twice_is_our_own_bug():
    with pytest.raises(AssertionError, match="sample id 7"):
        runner().run(engine(), [EpisodeRequest(ROWS[0], 7, 0), EpisodeRequest(ROWS[1], 7, 1)])


def test_no_episode_still_takes_part():
    entered = []
    made = engine()
    mode = made.generation_mode

    def watched():
        entered.append(current_layout().rank)
        return mode()

    made.generation_mode = watched
    assert runner().run(made, []) == []
    assert entered == [0]


# ---- limits, rewards of turns, and environments that fail


def test_an_episode_has_no_more_turns_than_its_limit(finished):
    """The environment has more to say after the first response; it is asked for the end instead."""
    once = replace(runner(), config=EpisodesConfig(max_turns=1))
    longer = {f.sample.sample_id: f.sample for f in finished}
    for f in once.run(engine(), requests()):
        whole = longer[f.sample.sample_id]
        assert f.sample.loss_mask.all()
        assert whole.response_ids[: len(f.sample.response_ids)].equal(f.sample.response_ids)
        if f.sample.prompt.row % 2 == 0:
            assert (f.sample.finish_reason, f.reward.value) == ("length", -1.0)
        else:
            assert f.sample.finish_reason == whole.finish_reason


def test_a_turn_may_have_a_limit_of_its_own():
    for f in replace(runner(), config=EpisodesConfig(max_turn_length=3)).run(engine(), requests()):
        mask = "".join("x" if one else "." for one in f.sample.loss_mask.tolist())
        assert all(len(turn) <= 3 for turn in mask.split(".") if turn)
        assert f.num_turns == len(mask.replace(".", " ").split())


@dataclass
class Rewarded(TwoTries):
    """Every try but the last is worth a quarter of a point."""

    def reply(self, completion):
        reply = super().reply(completion)
        return replace(reply, reward=0.25) if isinstance(reply, Observation) else Done(RewardResult(1.0))

    def cut(self):
        return Done(RewardResult(-1.0))


def test_rewards_of_turns_are_added_up_and_logged_by_turn():
    seen = set()
    for f in runner(Rewarded, limit=16).run(engine(), requests()):
        result = f.scored(f.reward)
        turns = [value for name, value in sorted(result.diagnostics.items()) if name.startswith("turn_")]
        was_asked_again = f.sample.prompt.row % 2 == 0
        end = -1.0 if f.reward.value == -1 else 1.0
        assert result.value == end + (0.25 if was_asked_again else 0.0)
        assert result.diagnostics["turns"] == f.num_turns
        # One that is cut after its first try has both rewards in one turn.
        expected = ([0.25, end] if f.num_turns == 2 else [0.25 + end]) if was_asked_again else []
        assert turns == expected
        seen.add((f.num_turns, end))
    assert seen == {(1, 1.0), (2, 1.0), (1, -1.0)}


def failing(how, which=(0, 5, 10), base=TwoTries):
    """Episodes of some samples fail: at the start, in a reply, in the second reply, or at the cut."""
    begun = []

    @dataclass
    class Failing(base):
        number: int = -1

        def __post_init__(self):
            self.number = len(begun)  # episodes begin in the order of the requests
            begun.append(self)
            if how == "start" and self.number in which:
                raise ValueError("cannot start")

        def reply(self, completion):
            if self.number in which:
                if how == "reply" or (how == "second" and self.tries):
                    raise ValueError("cannot reply")
                if how == "hang":
                    time.sleep(30)
                if how == "nonsense":
                    return "words"
            return super().reply(completion)

        def cut(self):
            if how == "cut" and self.number in which:
                raise ValueError("cannot cut")
            return super().cut()

    return Failing


@pytest.mark.parametrize("how", ["start", "reply", "second", "cut", "nonsense", "hang"])
def test_an_episode_that_fails_costs_itself_alone(finished, how):
    """The others have the tokens and rewards that they have without it; it is unscored, counted and says why."""
    config = EpisodesConfig(num_workers=2, reply_seconds=1.0) if how == "hang" else EpisodesConfig()
    found = replace(runner(failing(how)), config=config).run(engine(), requests())
    failed = {f.sample.sample_id for f in found if f.reward.failure is not None}
    assert failed == {0, 5, 10} if how in ("start", "reply", "nonsense", "hang") else failed < {0, 5, 10}
    whole = plain(finished)
    assert {k: v for k, v in plain(found).items() if k not in failed} == {
        k: v for k, v in whole.items() if k not in failed
    }
    for f in found:
        if f.sample.sample_id in failed:
            assert f.reward.value is None
            assert f.reward.counts == {"failed": 1.0, "timed_out": float(how == "hang")}
            assert "episode of row" in f.reward.failure
            ids = f.sample.response_ids.tolist()
            assert not f.sample.loss_mask.any() if how == "start" else ids == whole[f.sample.sample_id][0][: len(ids)]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("which", [range(20), range(5), range(3, 20)])
def test_episodes_that_fail_at_their_start_hide_none_behind_them(finished, which, workers):
    """Those under way had all failed, and the others were never begun."""
    made = replace(runner(failing("start", which)), config=EpisodesConfig(num_workers=workers))
    found = made.run(engine(), requests())
    assert [f.sample.sample_id for f in found if f.reward.failure] == list(which)
    whole = plain(finished)
    assert {k: v for k, v in plain(found).items() if k not in which} == {
        k: v for k, v in whole.items() if k not in which
    }


def test_an_end_without_the_reward_that_is_promised_is_a_failure():
    @dataclass
    class Nothing(TwoTries):
        def reply(self, completion):
            return Done() if len(completion.token_ids) % 2 else super().reply(completion)

        def cut(self):
            return None if len(self.tries) > 1 else Done()

    found = replace(runner(Nothing, limit=10), gives_rewards=True).run(engine(), requests())
    words = {f.reward.failure.splitlines()[1] for f in found if f.reward.failure is not None}
    assert any("the environment gave Done(reward=None" in said for said in words)
    assert any(said.startswith("cut() of the environment: ") for said in words)
    assert all("no reward in it, though the environment says gives_rewards" in said for said in words)


def test_episodes_that_nobody_waits_for_any_more_are_let_go():
    """An engine that fails in the middle, or a run that stops, leaves no session of an environment open."""
    under_way, cut = set(), set()

    class Noted(TwoTries):
        @property
        def prompt(self):
            under_way.add(id(self.tries))
            return super().prompt

        def reply(self, completion):
            reply = super().reply(completion)
            if isinstance(reply, Done):
                under_way.remove(id(self.tries))
            return reply

        def cut(self):
            cut.add(id(self.tries))
            return super().cut()

    stream = runner(Noted).stream(engine(max_batch_size=3), requests())
    next(stream)
    assert under_way
    assert not cut
    stream.close()
    assert cut == under_way


@pytest.mark.parametrize("workers", [1, 3])
def test_how_many_replies_are_worked_on_at_a_time_changes_nothing(finished, workers):
    """Not even which requests are drawn together, however long each reply takes."""

    @dataclass
    class Slow(TwoTries):
        def reply(self, completion):
            time.sleep(0.002 * ((self.row.row * 7 + len(self.tries)) % 5))
            return super().reply(completion)

    seen = []
    for start in (TwoTries, Slow):
        batches = []
        made = replace(runner(start), config=EpisodesConfig(num_workers=workers))
        assert plain(made.run(noting(engine(max_batch_size=7), batches), requests())) == plain(finished)
        seen.append([[r.sample_id for r in batch] for batch in batches])
    assert seen[0] == seen[1]


def test_failed_episodes_leave_every_other_number_of_an_iteration():
    """Where they fail, and with how many tokens, is seen in what counts failures alone."""
    numbers = []
    for how in ("start", "reply", "second"):
        draw = RowSampler(PromptStream(len(ROWS), seed=0, shuffle=False), 5, Layout)
        # Rows of two tries: no sample that is to fail ends before its second reply.
        source = RolloutSource(ROWS, draw, 4, runner(failing(how, (0, 8)), limit=60), engine, None, seed=3)
        collect = partial(source.collect, 0, Timer())
        _, info = gather_sample_info(collect, single({"policy": policy()}).collectives)
        assert sum(i.failure is not None for i in info) == 2
        found = reward_metrics(info) | length_metrics(info) | reward_counts(info)
        numbers.append((found, [i.meta.loss_tokens for i in info], torch.from_numpy(info.reward)))
    for other in numbers[1:]:
        assert other[:2] == numbers[0][:2]
        torch.testing.assert_close(other[2], numbers[0][2], equal_nan=True)
