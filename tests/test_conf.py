"""Every key in ``conf/`` has an owner and a reader, every choice composes, and a wrong one is refused in words.

Composes with Hydra in this process, as ``train.py`` does, and converts as a run does. Whole command lines are in
``end_to_end/test_bad_input.py``.
"""

import dataclasses
import math

import hydra
import pytest
import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rlmodule import cli
from rlmodule.advantages import ADVANTAGES
from rlmodule.algorithm.config import AlgorithmConfig
from rlmodule.algorithm.critic import CriticConfig
from rlmodule.batching.sampler import BatchingConfig
from rlmodule.callbacks import CALLBACKS
from rlmodule.commands import COMMANDS
from rlmodule.core.errors import ConfigError, RLModuleError
from rlmodule.data.config import DataConfig
from rlmodule.environments import ENVIRONMENTS
from rlmodule.evaluation.config import ValConfig
from rlmodule.experience.ahead import AheadConfig
from rlmodule.experience.episodes import EpisodesConfig
from rlmodule.experience.replay import ReplayConfig
from rlmodule.loggers import LOGGERS
from rlmodule.losses import LOSSES
from rlmodule.models.description import ModelConfig
from rlmodule.optim import OPTIMIZERS
from rlmodule.records.run_directory import RunDirectory
from rlmodule.records.secrets import looks_secret
from rlmodule.rewards import REWARDS
from rlmodule.rollout import ROLLOUTS
from rlmodule.rollout.parts.sampling import SamplingConfig
from rlmodule.run.config import EnvironmentSizes, GeneralConfig, RunConfig, WarmStartConfig
from rlmodule.run.launchers import LAUNCHERS
from rlmodule.run.run import Run
from rlmodule.run.trainer_config import TrainerConfig
from strategies.registry import STRATEGIES
from tests.helpers import composing
from tests.helpers.backends import PACKAGES, needing

# Sections of one dataclass, and sections whose dataclass is chosen from a menu by the key ``name``.
SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "algorithm": AlgorithmConfig,
    "batching": BatchingConfig,
    "critic": CriticConfig,
    "warm_start": WarmStartConfig,
    "trainer": TrainerConfig,
    "val": ValConfig,
}
COMPONENTS = {
    "loss": LOSSES,
    "advantage": ADVANTAGES,
    "reward": REWARDS,
    "rollout": ROLLOUTS,
    "environment": ENVIRONMENTS,
    "optimizer": OPTIMIZERS,
    "launcher": LAUNCHERS,
}
# What else a component's section holds, whatever the component.
BESIDE = {"rollout": (SamplingConfig, ReplayConfig, AheadConfig), "environment": (EpisodesConfig, EnvironmentSizes)}

# What a choice cannot do without: files and functions are the user's.
NEEDS = {
    "model=local": ["model.path=folder"],
    "data=files": ["data.train_files=[prompts.jsonl]"],
    "data=rollouts": ["data.rollouts=folder"],
    "algorithm=distill": ["algorithm.teacher=folder"],
    "algorithm=distill_topk": ["algorithm.teacher=folder"],
    "environment=custom": ["environment.path=problem.py:Mine"],
    "environment=openenv": ["environment.url=http://localhost:8000"],
    "environment=verifiers": ["environment.env_id=gsm8k"],
    "reward=function": ["reward.path=math:sqrt"],
    "reward=regex": ["reward.pattern=a"],
    "reward=length": ["reward.start=1"],
    "reward=llm_judge": ["reward.url=http://h/v1", "reward.model=m"],
    "reward=reward_model": ["reward.path=folder"],
    "rollout=server": ["rollout.url=http://h:1"],
    "reward=weighted": ["+reward.exact_match.name=exact_match"],
    "reward=by_source": ["reward.otherwise=exact_match"],
}
# A function and a reward model are looked for when they are chosen; their tests have them.
# a section for each part; see tests/rewards/test_weighted.py
SUMS = ("reward=weighted", "reward=by_source", "reward=math_format")
ABSENT = (
    "reward=function",
    "reward=reward_model",
    "environment=custom",
    "environment=openenv",
    "environment=verifiers",
)

CHOICES = [
    f"{path.parent.name}={path.stem}" for path in sorted(cli.CONF.glob("*/*.yaml")) if path.parent.name != "callbacks"
]
CALLBACK_FILES = sorted(path.stem for path in (cli.CONF / "callbacks").glob("*.yaml"))


def compose(*overrides):
    """The configuration of ``python train.py OVERRIDES``, and of what they cannot do without."""
    return composing.compose(*(more for o in overrides for more in NEEDS.get(o, [])), *overrides)


def fields_of(cls):
    return {field.name for field in dataclasses.fields(cls) if field.init}


def with_packages(choice):
    """A strategy that needs a package which not every environment has carries its mark."""
    group, name = choice.split("=")
    return pytest.param(choice, marks=needing(name)) if group == "strategy" and name in PACKAGES else choice


@pytest.mark.parametrize("choice", [with_packages(c) for c in CHOICES if c not in ABSENT])
def test_every_choice_composes_and_converts(choice):
    """A key without an owner would be refused here."""
    node = compose(choice)
    config = RunConfig.read(node)
    assert config.general == GeneralConfig()
    group, name = choice.split("=")
    if group == "strategy" and name != "auto":
        options = STRATEGIES.lookup("language_model", node.strategy.name, device="cpu").config_class
        assert set(node.strategy) == fields_of(options) | {"name"}


@pytest.mark.parametrize("name", CALLBACK_FILES)
def test_every_set_of_callbacks_composes_and_converts(name):
    config = RunConfig.read(compose(f"callbacks={name}"))
    if name not in ("default", "none"):
        assert list(config.callbacks) == [name], "a file of the menu switches on the callback of its name"


def test_the_default_switches_every_callback_on_and_saves_last():
    config = RunConfig.read(compose())
    assert sorted(config.callbacks) == CALLBACKS.names()
    assert list(config.callbacks)[-1] == "checkpoint"


def test_loggers_are_chosen_by_name_one_or_several():
    assert list(RunConfig.read(compose()).loggers) == ["tensorboard"]
    for name in LOGGERS.names():
        config = compose(f"logger={name}")
        assert set(config.logger[name]) == fields_of(LOGGERS.get(name))
        assert list(RunConfig.read(config).loggers) == [name], "the file switches on the logger of its name"
    assert list(RunConfig.read(compose("logger=[csv,tensorboard]")).loggers) == ["csv", "tensorboard"]
    for nothing in ("logger=none", "logger=[]", "~logger"):
        assert RunConfig.read(compose(nothing)).loggers == {}


@pytest.mark.parametrize("choice", [c for c in CHOICES if c.split("=")[0] in SECTIONS])
def test_every_field_of_a_section_can_be_seen_and_set(choice):
    """Hydra refuses a key that stands in no file, so a field that is missing here could not be set."""
    group = choice.split("=")[0]
    assert set(compose(choice)[group]) == fields_of(SECTIONS[group])


@pytest.mark.parametrize("choice", [c for c in CHOICES if c.split("=")[0] in COMPONENTS and c not in SUMS])
def test_every_field_of_a_component_can_be_seen_and_set(choice):
    group = choice.split("=")[0]
    section = compose(choice)[group]
    if choice == "environment=none":  # nothing runs that could have limits
        assert set(section) == fields_of(EnvironmentSizes) | {"name"}
        return
    own = fields_of(COMPONENTS[group].get(section.name))
    assert set(section) == own.union({"name"}, *map(fields_of, BESIDE.get(group, ())))


@pytest.mark.parametrize("name", [n for n in ENVIRONMENTS.names() if f"environment={n}" not in ABSENT])
def test_an_environment_is_complete_by_its_name_alone(name):
    """Its reward, its lengths and its warm start come along."""
    config = compose(f"environment={name}")
    assert config.environment.name == name
    assert RunConfig.read(config).environment_name == name
    sizes = config.environment
    assert (config.data.max_prompt_length, config.data.max_response_length) == (
        sizes.max_prompt_length,
        sizes.max_response_length,
    )
    assert config.rollout.max_response_length == sizes.max_response_length
    assert config.warm_start.steps == sizes.warm_start_steps


@pytest.mark.parametrize("name", ["sort", "countdown"])
def test_data_chooses_the_first_environments_as_well(name):
    assert compose(f"data={name}") == compose(f"environment={name}")


def test_files_and_stored_rollouts_set_no_environment():
    for choice in ("data=files", "data=rollouts"):
        config = RunConfig.read(compose(choice))
        assert (config.environment, config.environment_name) == (None, "none")
    assert compose("environment=countdown", "reward=function").reward.name == "function", "a choice of one's own wins"


@pytest.mark.parametrize("name", CALLBACKS.names())
def test_every_field_of_a_callback_can_be_seen_and_set(name):
    assert set(compose(f"callbacks={name}").callbacks[name]) == fields_of(CALLBACKS.get(name))


def test_the_keys_at_the_top_are_those_of_the_run():
    groups = {path.parent.name for path in cli.CONF.glob("*/*.yaml")} - {
        "experiment",
        "sweep",
        "debug",
        "rollout_correction",
    }
    assert set(compose()) == groups | fields_of(GeneralConfig)
    for command in COMMANDS.names():
        assert set(compose(f"command={command}").command) == fields_of(COMMANDS.get(command)) | {"name"}


@pytest.mark.parametrize("group", COMPONENTS)
def test_every_component_has_a_file_of_its_name(group):
    there = set(cli.menu(group))
    assert set(COMPONENTS[group].names()) <= there
    for name in COMPONENTS[group].names():
        assert compose(f"{group}={name}")[group].name == name


def test_every_strategy_and_every_callback_has_a_file_of_its_name():
    assert set(STRATEGIES.backends()) | {"auto"} <= set(cli.menu("strategy"))
    for name in STRATEGIES.backends():
        assert compose(f"strategy={name}").strategy.name == name
    for name in cli.menu("strategy"):
        assert compose(f"strategy={name}").strategy.name in ("auto", *STRATEGIES.backends()), "a preset names a backend"
    assert set(CALLBACKS.names()) | {"default", "none"} == set(cli.menu("callbacks"))


@pytest.mark.parametrize("sweep", ["experiment=compare", *(f"sweep={name}" for name in cli.menu("sweep"))])
def test_a_sweep_names_keys_that_exist_and_values_that_convert(sweep):
    with hydra.initialize_config_dir(str(cli.CONF), version_base="1.3"):
        params = hydra.compose("train", [sweep], return_hydra_config=True).hydra.sweeper.params
    assert params
    assert set(params) <= set(cli.known_keys())
    for key, values in params.items():
        words = str(values).replace("range(", "").strip("()").replace(" ", "").split(",")
        assert key not in COMPONENTS | SECTIONS or set(words) <= set(cli.menu(key))
        RunConfig.read(compose(f"{key}={words[0]}"))


def test_conf_says_what_the_code_says():
    """Defaults stand in the file a person reads and in the dataclass a program uses; where they differ it is on purpose.

    On purpose: sizes of the built-in example, which dataclasses leave at sizes for real models.
    """
    purpose = {
        "data": {"max_prompt_length", "max_response_length", "warm_start_steps"},
        "environment": {"max_prompt_length", "max_response_length", "warm_start_steps", "max_turns"},
        "model": {"architecture", "tokenizer", "lora", "lr", "sft_lr", "value_lr"},
        "algorithm": {"loss_scale_factor", "overlong_buffer"},
        "optimizer": {"schedule", "min_lr_ratio"},
        "warm_start": {"steps"},
        "trainer": {"devices"},
        "loss": {"clip_ratio_high"},
        "rollout": {"max_response_length"},
        "overlong_buffer": {"max_length"},
    }
    config = compose()
    read = RunConfig.read(config)
    sections = {group: (SECTIONS[group], config[group]) for group in SECTIONS}
    sections |= {group: (COMPONENTS[group].get(config[group].name), config[group]) for group in COMPONENTS}
    # Another key for each, since a section holds several: it is the first word that is looked up above.
    sections |= {f"{group}+{cls.__name__}": (cls, config[group]) for group in BESIDE for cls in BESIDE[group]}
    sections |= {f"callbacks.{name}": (CALLBACKS.get(name), config.callbacks[name]) for name in config.callbacks}
    assert read.trainer.devices == TrainerConfig().devices, "1 and '1' are the same number of processes"
    for group, (cls, section) in sections.items():
        given = OmegaConf.to_container(section, resolve=True)
        for field in dataclasses.fields(cls):
            if not field.init or field.name in purpose.get(group.split("+")[0], ()):
                continue
            default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
            default = dataclasses.asdict(default) if dataclasses.is_dataclass(default) else default
            value = tuple(given[field.name]) if isinstance(default, tuple) else given[field.name]
            if isinstance(default, dict):  # a section within a section
                value = value | {k: default[k] for k in purpose.get(field.name, ())}
                value = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k != "name"}
            assert value == default, f"{group}.{field.name}"


def test_no_key_of_ours_looks_like_a_secret():
    """Its value would be masked in what a run saves; keys in mappings of the user's may be secrets."""

    def keys(node):
        for name, value in node.items() if isinstance(node, dict) else ():
            yield str(name)
            yield from keys(value)

    files = {path: OmegaConf.to_container(OmegaConf.load(path), resolve=False) for path in cli.CONF.glob("**/*.yaml")}
    assert [(path.name, key) for path, node in files.items() for key in keys(node) if looks_secret(key)] == []


def test_the_name_that_is_printed_for_help_lists_every_menu():
    """``known_keys`` and ``menu`` are what a misspelt word is compared with."""
    known = set(cli.known_keys())
    assert {"optimizer.lr", "environment.test_size", "callbacks.report.dpi", "seed", "rollout"} <= known
    assert cli.menu("algorithm") == sorted(p.stem for p in (cli.CONF / "algorithm").glob("*.yaml"))


# ---- SPEC 11: the key, the value, the reason, the fix


def refusal_of(tmp_path, *overrides):
    """The error that ends ``python train.py OVERRIDES`` before a model is loaded."""
    try:
        with pytest.raises(RLModuleError) as caught:
            config = compose(f"run_dir={tmp_path / 'run'}", *overrides)
            Run.read(config, RunDirectory(tmp_path / "run"), STRATEGIES).check()
    except HydraException as error:
        return cli.to_config_error(error)
    return caught.value


SHARED = ("algorithm=ppo", "model.value=shared")
SMALL_VOCABULARY = ("+critic.architecture.model_type=llama", "+critic.architecture.vocab_size=9")
EQUAL = ("batching.equal_counts=true", "trainer.devices=2")
ONLINE_PAIRS = ("algorithm=dpo", "algorithm.source=rollouts", "rollout.n=2")


@pytest.mark.parametrize(
    ("overrides", "key", "got", "says"),
    [
        (["strategy=fsdp3"], "strategy", "fsdp3", "Known: auto, automodel, ddp, deepspeed, fsdp, fsdp2, megatron, single"),
        (["optimizer.lr=inf"], "optimizer.lr", math.inf, "it is not finite"),
        (["optimizer.lr=1e400"], "optimizer.lr", math.inf, "it is not finite"),
        (["optimizer.weight_decay=inf"], "optimizer.weight_decay", math.inf, "it is not finite"),
        (["optimizer.betas=[inf,0.9]"], "optimizer.betas", [math.inf, 0.9], "it is not finite"),
        (["rollout.temperature=inf"], "rollout.temperature", math.inf, "it is not finite"),
        (["algorithm.kl_in_reward.coef=inf"], "algorithm.kl_in_reward.coef", math.inf, "it is not finite"),
        (["loss.clip_ratio_high=inf"], "loss.clip_ratio_high", math.inf, "it is not finite"),
        (["callbacks.report.dpi=100000"], "callbacks.report.dpi", 100000, "at most 1200"),
        (["seed=-1"], "seed", -1, "at least 0"),
        (["seed=18446744073709551615"], "seed", 18446744073709551615, "at most 9223372036854775807"),
        (["loss=ppo_clib"], "loss", "ppo_clib", "Did you mean ppo_clip"),
        (["advantage=grop"], "advantage", "grop", "Did you mean grpo"),
        (["data=sorrt"], "data", "sorrt", "Did you mean sort?"),
        (["loss.name=ppo_clib"], "loss", "ppo_clib", "Did you mean ppo_clip"),
        (["reward.name=exact"], "reward", "exact", "exact_match"),
        (["environment=sorrt"], "environment", "sorrt", "Did you mean sort?"),
        (["environment.name=sorrt"], "environment", "sorrt", "Did you mean sort?"),
        (["strategy.name=fsdp3"], "strategy", "fsdp3", "Known: automodel, ddp, deepspeed, fsdp, fsdp2, megatron, single"),
        (["batching.max_token_len_per_gpu=4"], "batching.max_token_len_per_gpu", 4, "32 + rollout.max_response_length=8"),
        (["batching.max_token_len_per_gpu=4"], "batching.max_token_len_per_gpu", 4, "Use batching.max_token_len_per_gpu=40"),
        (["trainer.devices=-3"], "trainer.devices", "-3", "Use trainer.devices=1"),
        (["trainer.devices=two"], "trainer.devices", "two", "Use trainer.devices=1"),
        (["trainer.devices=2", "strategy=single"], "trainer.devices", 2, "Use strategy=ddp, or trainer.devices=1"),
        (["trainer.max_epochs=0"], "trainer.max_epochs", 0, "must be at least 1"),
        (["trainer.max_epochs=many"], "trainer.max_epochs", "many", "Give a value of type int"),
        (["trainer.accelerator=tpu"], "trainer.accelerator", "tpu", "Known: auto, cpu"),
        (["optimizer.lr=-1"], "optimizer.lr", -1.0, "must be at least 0. Use optimizer.lr=0 or more"),
        (["optimizer.lr=fast"], "optimizer.lr", "fast", "Give a value of type float"),
        (["optimizer.schedule=cosin"], "optimizer.schedule", "cosin", "Did you mean cosine?"),
        (["optimizer.betas=[0.9,1.5]"], "optimizer.betas", [0.9, 1.5], "Use [0.9,0.95]"),
        (["optimizer.betas=[0.9]"], "optimizer.betas", [0.9], "two numbers are needed"),
        (["algorithm.loss_agg_mode=token_mean"], "algorithm.loss_agg_mode", "token_mean", "token-mean"),
        (["algorithm.kl_loss_type=k9"], "algorithm.kl_loss_type", "k9", "k3"),
        (["rollout.temperature=0"], "rollout.temperature", 0.0, "Use rollout.temperature=1.0"),
        (["algorithm.kl_loss_coef=-0.1"], "algorithm.kl_loss_coef", -0.1, "must be at least 0"),
        (["rollout.top_p=95"], "rollout.top_p", 95.0, "must be at most 1"),
        (["rollout.top_p=0"], "rollout.top_p", 0.0, "greater than 0"),
        (["rollout.n=1"], "rollout.n", 1, "Use rollout.n=8"),
        (["rollout.max_response_length=500", "batching.max_token_len_per_gpu=1000"], "rollout.max_response_length", 500, "256"),
        (["algorithm=ppo", "rollout.max_response_length=224", "advantage.bootstrap_truncated=true"], "rollout.max_response_length", 224, "up to 255 at most"),
        (["batching.use_dynamic_bsz=false"], "batching.micro_batch_size_per_gpu", None, "batching.use_dynamic_bsz=true"),
        (["batching.planner=best"], "batching.planner", "best", "Known: joint"),
        (["batching.equal_counts=true", "batching.mini_batch_size=15", "trainer.devices=2"], "batching.mini_batch_size", 15, "=16"),
        (["batching.keep_groups=true", "batching.mini_batch_size=12"], "batching.mini_batch_size", 12, "Use batching.mini_batch_size=16"),
        (["batching.keep_groups=true", "batching.max_token_len_per_gpu=300"], "batching.max_token_len_per_gpu", 300, "=320"),
        (["batching.keep_groups=true", "batching.share_prompts=true", "batching.max_token_len_per_gpu=90"], "batching.max_token_len_per_gpu", 90, "behind one prompt"),
        (["batching.keep_groups=true", "batching=fixed", "batching.micro_batch_size_per_gpu=4"], "batching.micro_batch_size_per_gpu", 4, "Use 8 or more"),
        (["batching.keep_groups=true", "batching.equal_counts=true"], "batching.equal_counts", True, "batching.keep_groups=false"),
        (["algorithm=dpo", "algorithm.source=demonstrations"], "algorithm.source", "demonstrations", "Use algorithm.source=preferences"),
        (["algorithm=dpo", "algorithm.source=rollouts"], "algorithm.source", "rollouts", "rollout.n=2"),
        (["algorithm=dpo", "batching=dynamic"], "batching.keep_groups", False, "Use true"),
        (["algorithm=gdpo", "algorithm.overlong_buffer.enable=true"], "algorithm.overlong_buffer.enable", True, "length"),
        (["algorithm=gdpo", "algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward", True, "use_kl_loss=true"),
        (["algorithm=dpo", "algorithm.mask_truncated=true"], "algorithm.mask_truncated", True, "Use false"),
        ([*ONLINE_PAIRS, "rollout_correction=tis"], "algorithm.rollout_correction.mode", "truncate", "mode=observe"),
        ([*ONLINE_PAIRS, "rollout_correction=icepop"], "algorithm.rollout_correction.mode", "mask", "whichever policy drew"),
        ([*ONLINE_PAIRS, "rollout_correction=geo_rs"], "algorithm.rollout_rejection.sequence_estimator", "k1", "=none"),
        (["algorithm=dpo", "advantage=maxrl"], "advantage", "maxrl", "Use advantage=grpo"),
        (["algorithm=dpo", "advantage=grpo_passk"], "advantage", "grpo_passk", "a negative number"),
        ([*ONLINE_PAIRS, "advantage=optimal_token_baseline"], "advantage", "optimal_token_baseline", "in its sign"),
        ([*ONLINE_PAIRS, "advantage=reinforce_pp_baseline"], "advantage", "reinforce_pp_baseline", "in its sign"),
        (["algorithm=dpo", "advantage=remax"], "advantage", "ReMax", "Use advantage=grpo"),
        (["algorithm=ipo", "algorithm.use_kl_loss=true"], "algorithm.use_kl_loss", True, "Use false"),
        (["algorithm=dpo", "algorithm.old_logprob=rollout"], "algorithm.old_logprob", "rollout", "preferences were not sampled"),
        (["algorithm=dpo", "loss.nll_coef=-1"], "loss.nll_coef", -1.0, "at least 0"),
        (["algorithm=dpo", "loss.label_smoothing=0.9"], "loss.label_smoothing", 0.9, "0.5"),
        (["logger=neptune"], "logger", "neptune", "Known: csv, "),
        (["model=tiny", "model.path=folder"], "model.path", "folder", "exactly one must be given"),
        (["model=local", "model.path=/nowhere"], "model.path", "/nowhere", "Give a folder that holds config.json"),
        (["model.architecture.model_type=qwen33"], "model.architecture.model_type", "qwen33", "Did you mean qwen3"),
        (["+model.architecture.hiden_size=8"], "model.architecture.hiden_size", 8, "Did you mean hidden_size"),
        (["data.overlong_prompt=drop"], "data.overlong_prompt", "drop", "Known: error, filter, truncate_left"),
        (["data=files", "data.train_files=a.jsonl"], "data.train_files", "a.jsonl", "'data.train_files=[a.jsonl]'"),
        (["environment=countdown", "reward=exact_match"], "reward", "exact_match", "environment=countdown chooses its own"),
        (["data=files", "data.train_files=[]"], "data.train_files", [], "environment=sort"),
        (["environment=none"], "data.train_files", [], "Use data=files data.train_files=[FILE]"),
        (["environment=none", "data.rollouts=null"], "data.train_files", [], "environment=none makes no rows"),
        (["data.train_files=[a.jsonl]"], "data.train_files", ["a.jsonl"], "Use data=files, which sets environment=none"),
        (["environment=sort", "data=files", "data.train_files=[a]"], "data.train_files", ["a"], "environment=sort makes"),
        (["environment.test_size=5000"], "environment.test_size", 5000, "Use environment.test_size=1024"),
        (["+environment.tset_size=5"], "environment.tset_size", 5, "Did you mean test_size"),
        (["environment.warm_start_steps=few"], "environment.warm_start_steps", "few", "Give a value of type int"),
        (["rollout.stop=END"], "rollout.stop", "END", "'rollout.stop=[END]'"),
        (["rollout.stop=['']"], "rollout.stop", [""], "an empty text"),
        (["rollout.stop_token_ids=[-1]"], "rollout.stop_token_ids", -1, "at least 0"),
        (["+rollout.max_batchsize=1"], "rollout.max_batchsize", 1, "Did you mean max_batch_size"),
        (["rollout.staleness=-1"], "rollout.staleness", -1, "at least 0"),
        (["algorithm=sft", "algorithm.use_kl_loss=true"], "algorithm.use_kl_loss", True, "Use false"),
        (["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=k1"], "algorithm.kl_loss_type", "k1", "kl_loss_type=k2 or k1+"),
        (["algorithm.kl_in_reward.coef=-1"], "algorithm.kl_in_reward.coef", -1.0, "must be at least 0"),
        (["algorithm.kl_in_reward.controller=pid"], "algorithm.kl_in_reward.controller", "pid", "adaptive, fixed"),
        (["algorithm.filter_groups.max_num_gen_batches=0"], "algorithm.filter_groups.max_num_gen_batches", 0, "at least 1"),
        (["algorithm=dapo", "rollout.n=1"], "rollout.n", 1, "algorithm.filter_groups.enable=false"),
        (["algorithm=dapo", "algorithm.overlong_buffer.length=9"], "algorithm.overlong_buffer.length", 9, "max_length=8"),
        (["algorithm.rollout_correction.mode=clip"], "algorithm.rollout_correction.mode", "clip", "truncate"),
        (["optimizer=muon", "strategy=fsdp", "trainer.devices=2"], "optimizer", "muon", "strategy=fsdp2"),
        (["optimizer=muon", "strategy=deepspeed", "trainer.devices=2"], "optimizer", "muon", "strategy=ddp"),
        (["optimizer=muon", "strategy=fsdp2", "strategy.cpu_offload=true", "trainer.devices=2"], "optimizer", "muon", "cpu"),
        (
            ["algorithm=ppo", "model.value=separate", "optimizer@critic.optimizer=muon", "strategy=fsdp", "trainer.devices=2"],
            "critic.optimizer",
            "muon",
            "strategy=fsdp2",
        ),
        (["algorithm.rollout_rejection.token_estimator=k9"], "algorithm.rollout_rejection.token_estimator", "k9", "k1"),
        (["algorithm.rollout_rejection.sequence_reduce=min"], "algorithm.rollout_rejection.sequence_reduce", "min", "mean"),
        (
            ["algorithm.rollout_rejection.token_estimator=k1", "algorithm.old_logprob=rollout"],
            "algorithm.rollout_rejection.token_estimator",
            "k1",
            "old_logprob=recompute",
        ),
        (["algorithm=sft", "algorithm.rollout_rejection.sequence_estimator=k3"], "algorithm.rollout_rejection.sequence_estimator", "k3", "none"),
        (["advantage=weighted_optimal_token_baseline"], "advantage", "weighted_optimal_token_baseline", "rollout_correction=tis"),
        (["algorithm.rollout_correction.upper=0"], "algorithm.rollout_correction.upper", 0.0, "lower=0.0"),
        (["algorithm=sft", "algorithm.rollout_correction.mode=mask"], "algorithm.rollout_correction.mode", "mask", "Use none"),
        (["+algorithm.rollout_correction.uper=3"], "algorithm.rollout_correction.uper", 3, "Check the spelling"),
        (["algorithm=sft", "algorithm.old_logprob=rollout"], "algorithm.old_logprob", "rollout", "Use recompute"),
        (["algorithm.old_logprob=rollout", "rollout.top_k=5"], "algorithm.old_logprob", "rollout", "rollout.top_k=5"),
        (["algorithm.old_logprob=rollout", "rollout.top_p=0.9"], "algorithm.old_logprob", "rollout", "rollout.top_p=1"),
        (["rollout_correction=tis", "rollout.top_p=0.9"], "algorithm.rollout_correction.mode", "truncate", "mode=observe"),
        (["rollout_correction=icepop", "rollout.top_k=5"], "algorithm.rollout_correction.mode", "mask", "rollout.top_k=0"),
        (["rollout_correction=geo_rs", "rollout.top_p=0.9"], "algorithm.rollout_rejection.sequence_estimator", "k1", "=none"),
        (["algorithm.old_logprob=old"], "algorithm.old_logprob", "old", "Known: auto, available, recompute, rollout"),
        (["algorithm=sft", "rollout.temperature=0.5"], "rollout.temperature", 0.5, "Use 1.0"),
        (["algorithm=ppo", "critic.optimizer.lr=-1"], "critic.optimizer.lr", -1.0, "must be at least 0"),
        (["algorithm=ppo", "critic.coef=-1"], "critic.coef", -1.0, "must be at least 0"),
        (["model.value=both"], "model.value", "both", "Known: none, separate, shared"),
        (["algorithm=ppo", "model.value=none"], "model.value", "none", "Use model.value=shared"),
        (["model.value=shared"], "model.value", "shared", "advantage=gae"),
        (["algorithm=sft", "model.value=separate"], "model.value", "separate", "model.value=none"),
        (["algorithm=ppo", "critic.warmup_iterations=70"], "critic.warmup_iterations", 70, "trainer.max_epochs=70"),
        ([*SHARED, "critic.warmup_iterations=1"], "critic.warmup_iterations", 1, "no value model beside the policy"),
        ([*SHARED, "critic.mini_batch_size=64"], "critic.mini_batch_size", 64, "model.value=separate"),
        ([*SHARED, "critic.optimizer.lr=0.5"], "critic.optimizer.lr", 0.5, "model.value=separate"),
        (["critic.warmup_iterations=1"], "critic.warmup_iterations", 1, "model.value=none"),
        ([*SHARED, "critic.path=folder"], "critic.path", "folder", "model.value=separate"),
        (["algorithm=rm", "model.lora.r=4"], "model.lora.r", 4, "Use model.lora.r=0"),
        (["algorithm=rm", "critic.path=folder"], "critic.path", "folder", "model.value=separate"),
        (["algorithm=rm", "loss=dpo"], "model.kind", "reward_model", "Use algorithm=rm, or model.kind=policy"),
        (["algorithm=rm", "algorithm.source=rollouts", "rollout.n=2"], "algorithm.source", "rollouts", "algorithm=rm"),
        (["model.kind=reward_model"], "model.kind", "reward_model", "PPOClip is made of"),
        (["algorithm=ppo", "critic.path=/nowhere"], "critic.path", "/nowhere", "Give a folder that holds config.json"),
        (["algorithm=ppo", *SMALL_VOCABULARY], "critic.architecture", {"model_type": "llama", "vocab_size": 9}, "260"),
        (["algorithm=ppo", *EQUAL, "critic.mini_batch_size=9"], "critic.mini_batch_size", 9, "critic.mini_batch_size=10"),
        (["algorithm=ppo", "batching.keep_groups=true", "critic.mini_batch_size=9"], "critic.mini_batch_size", 9, "=16"),
        (["callbacks.checkpoint.keep=0"], "callbacks.checkpoint.keep", 0, "must be at least 1"),
        (["callbacks.checkpoint.best_mode=most"], "callbacks.checkpoint.best_mode", "most", "Known: max, min"),
        (["+callbacks=checkpoint"], "+callbacks", "checkpoint", "Use callbacks=checkpoint"),
        (["+callbacks.foo={}"], "callbacks", "foo", "Known: checkpoint, "),
        (["+logger.foo={}"], "logger", "foo", "Known: csv, "),
        (["+logger.tensorboard.flush=1"], "logger.tensorboard.flush", 1, "no such key"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_key_value_and_fix(tmp_path, overrides, key, got, says):
    error = refusal_of(tmp_path, *overrides)
    assert isinstance(error, ConfigError)
    assert (error.key, error.got) == (key, got)
    assert str(error).startswith(f"{key}={got}: ")
    assert says in str(error)
    assert error.because
    assert not (tmp_path / "run").exists(), "a run that is refused leaves nothing behind"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it is refused where there is no accelerator")
def test_an_accelerator_that_is_not_there_is_refused_as_it_was_typed(tmp_path):
    message = str(refusal_of(tmp_path, "trainer.accelerator=gpu"))
    assert message == "trainer.accelerator=gpu: this machine has cpu only. Use trainer.accelerator=auto"


OWN_FILES = ["data=files", "data.max_prompt_length=100", "data.max_response_length=100", "rollout.n=2"]


@pytest.mark.parametrize("key", ["optimizer.eps", "algorithm.entropy_coeff", "rollout.top_p", "warm_start.lr"])
def test_nan_is_no_value(tmp_path, key):
    """It equals nothing, so it has a test of its own."""
    error = refusal_of(tmp_path, f"{key}=nan")
    assert str(error) == f"{key}=nan: it is not finite. Give a number"


def test_data_files_are_checked_before_a_model_is_loaded(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "fine", "answer": "1"}\n{"prompt": \n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    unanswered = tmp_path / "unanswered.jsonl"
    unanswered.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "' + "x" * 2000 + '", "answer": "1"}\n')
    for file, place, says in (
        (broken, f"{broken}:2", "not valid JSON"),
        (empty, str(empty), ""),
        (tmp_path / "absent.jsonl", "data.train_files", "absent.jsonl"),
        (long, f"{long}:1", "data.max_prompt_length"),
        (
            unanswered,
            f"{unanswered}:2",
            "it has no answer, and reward=exact_match compares with one. Set data.answer_key",
        ),
    ):
        message = str(refusal_of(tmp_path, *OWN_FILES, f"data.train_files=[{file}]"))
        assert message.startswith(place), message
        assert says in message


def test_a_demonstration_that_fits_no_micro_batch_is_named(tmp_path):
    """SPEC 3: for offline data the check is over the file, and names the row."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "' + "b" * 100 + '"}\n')
    error = refusal_of(
        tmp_path, "algorithm=sft", *OWN_FILES, f"data.train_files=[{file}]", "batching.max_token_len_per_gpu=64"
    )
    assert isinstance(error, ConfigError)
    assert error.key == "batching.max_token_len_per_gpu"
    assert "row 2 has 104 tokens" in str(error)
    assert "Use batching.max_token_len_per_gpu=104 or more" in str(error)


def test_a_pair_that_fits_no_micro_batch_is_named(tmp_path):
    """The prompt counts twice: 3 tokens of it and the end of the response make 4 around each response."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "' + "b" * 100 + '"}\n')
    error = refusal_of(
        tmp_path,
        "algorithm.source=preferences",
        "batching.keep_groups=true",
        "batching.max_token_len_per_gpu=100",
        *OWN_FILES,
        f"data.train_files=[{file}]",
    )
    assert isinstance(error, ConfigError)
    assert "row 1 has 109 tokens in 2 samples that stay together" in str(error)
    assert "Use batching.max_token_len_per_gpu=109 or more" in str(error)


def test_a_value_that_cannot_be_read_is_explained():
    with pytest.raises(HydraException) as caught:
        compose("data.system_prompt={a")
    error = cli.to_config_error(caught.value)
    assert (error.key, error.got) == ("data.system_prompt", "{a")
    assert "Quote values" in str(error)
    with pytest.raises(HydraException) as caught:
        compose("loss=sft,ppo_clip")
    assert "'loss=sft,ppo_clip'" in str(cli.to_config_error(caught.value))
    assert "--multirun" in str(cli.to_config_error(caught.value))
