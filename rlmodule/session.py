"""One run from settings to result: check, write down, warm start, build the parts, fit.

Gets the strategy menu handed in, so that this package never imports ``strategies``. Leaves out the command line
(``train.py``) and the start of ranks (``launch.py``).
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlmodule.batching.collate import DynamicCollator
from rlmodule.batching.sampler import BalancedSampler
from rlmodule.batching.workload import Workload
from rlmodule.callbacks.metrics import purge_step
from rlmodule.checkpoint.state import STATE_FILE, newest_whole, read_manifest, verify
from rlmodule.core.config import convert
from rlmodule.core.contract import Layout, ModelObjective, RolloutEngine
from rlmodule.core.errors import ConfigError
from rlmodule.core.types import CRITIC, POLICY, REFERENCE, TEACHER, Prompt, SampleMeta
from rlmodule.critic import CriticObjective, JointObjective
from rlmodule.data.prompts import load_prompts
from rlmodule.data.stream import PromptStream
from rlmodule.datamodule import RLDataModule
from rlmodule.experience.maker import ExperienceMaker
from rlmodule.experience.reference_scores import ReferenceScores
from rlmodule.launch import launched_from_outside
from rlmodule.models.compiled import check_compiler
from rlmodule.models.policy import (
    NO_VALUE,
    ONLY,
    SEPARATE,
    SHARED,
    ModelConfig,
    load_model_config,
    load_tokenizer,
    outline_policy,
    parameter_count,
    shape_of,
)
from rlmodule.models.recompute import SELECTIVE, check_offload
from rlmodule.models.value import outline_value_model, value_config, with_value_head
from rlmodule.module import RLModule
from rlmodule.objective import Objective
from rlmodule.optimizer import OptimizerConfig
from rlmodule.preflight.checks import check
from rlmodule.preflight.layout import check_layout
from rlmodule.preflight.value_model import check_value_model
from rlmodule.replay import ReplayMemory
from rlmodule.run_context import EventLog, RunContext
from rlmodule.run_directory import RunDirectory
from rlmodule.run_plan import ModelFacts, RunPlan
from rlmodule.settings import Settings
from rlmodule.shaping import KLController
from rlmodule.sources import Examination
from rlmodule.supplies import SUPPLIES, Supply
from rlmodule.teacher import check_teacher, teacher_model
from rlmodule.update import Trainable

AUTO_BACKEND = "auto"
# What a strategy must be able to spread, by model.value.
MODEL_TYPES = {
    NO_VALUE: ("language_model",),
    SHARED: ("policy_value",),
    SEPARATE: ("language_model", "value_model"),
    ONLY: ("value_model",),
}
Minimised = dict[str, tuple[ModelObjective, OptimizerConfig]]  # what each model that trains minimises, and how


class StrategyMenu(Protocol):
    """What is asked of the strategy registry."""

    def lookup(self, model_type: str, backend: str, *, device: str | None = None, vendor: str | None = None) -> type:
        """The class for this machine."""


@dataclass
class Session:
    """One run.

    Args:
        settings: checked configuration.
        run_dir: where it writes.
        menu: strategies to choose from.
        strategy_node: the strategy section as configured; its keys belong to the chosen strategy.
        is_first: whether this process writes files and talks.
    """

    settings: Settings
    run_dir: RunDirectory
    menu: StrategyMenu
    strategy_node: Mapping[str, Any] = field(default_factory=dict)
    is_first: bool = True

    @classmethod
    def read(cls, config: DictConfig, run_dir: RunDirectory, menu: StrategyMenu) -> Session:
        """Convert the configuration.

        Raises:
            ConfigError: the first thing that is wrong, with its full key.
        """
        settings = Settings.read(config)
        session = cls(settings, run_dir, menu, config.strategy)
        if settings.backend == AUTO_BACKEND:
            session.settings = replace(settings, backend="single" if session.world_size == 1 else "ddp")
        return session

    # ---- what it runs on

    @cached_property
    def device(self) -> str:
        """Kind of device: cpu, cuda, ..."""
        asked = self.settings.trainer.accelerator
        wanted = {"gpu": "cuda"}.get(asked, asked)
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        here = "cpu" if found is None else found.type
        if wanted not in ("auto", "cpu", here):
            raise ConfigError(
                key="trainer.accelerator",
                got=asked,
                because=f"this machine has {here} only",
                fix="Use trainer.accelerator=auto",
            )
        return here if wanted == "auto" else wanted

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        devices = self.settings.trainer.devices
        here = torch.accelerator.device_count() if self.device != "cpu" else None
        if devices == "auto":
            return here or 1
        if here is not None and int(devices) > here:
            raise ConfigError(
                key="trainer.devices",
                got=devices,
                because=f"this machine has {here} {self.device} devices",
                fix=f"Use trainer.devices={here}",
            )
        return int(devices)

    @property
    def world_size(self) -> int:
        """Processes of the run over all machines."""
        return self.num_processes * self.settings.trainer.num_nodes

    @property
    def needs_supervisor(self) -> bool:
        """Whether the ranks of this run have yet to be started."""
        return self.num_processes > 1 and not launched_from_outside()

    @cached_property
    def strategy_class(self) -> Any:
        """The strategy chosen by name, for this machine."""
        found = [
            self.menu.lookup(kind, self.settings.backend, device=os.environ.get("RLMODULE_DEVICE", self.device))
            for kind in MODEL_TYPES[self.settings.model.value]
        ]
        assert len(set(found)) == 1, f"one strategy spreads all models of a run, got {found}"
        return found[0]

    @cached_property
    def strategy_options(self) -> Any:
        """The strategy's own options, checked."""
        return convert(self.strategy_class.options, self.strategy_node, "strategy", ignore=("name",))

    @property
    def layout(self) -> Layout:
        """How the run's processes are laid out, seen from the first."""
        return self.strategy_class.layout_of(self.strategy_options, self.world_size)

    def new_strategy(self) -> Any:
        """The strategy, which refuses options that do not fit the number of processes."""
        return self.strategy_class(
            self.strategy_options,
            device=self.device,
            num_processes=self.num_processes,
            num_nodes=self.settings.trainer.num_nodes,
        )

    def join_peers(self) -> None:
        """Under torchrun or srun: meet the other ranks, and learn the run directory from the first."""
        if launched_from_outside():
            join_process_group()
            if dist.get_world_size() != self.world_size:
                raise ConfigError(
                    key="trainer.devices",
                    got=self.settings.trainer.devices,
                    because=f"torchrun or srun started {dist.get_world_size()} processes, and trainer.devices x "
                    f"trainer.num_nodes is {self.world_size}",
                    fix="Set trainer.devices to the processes of one machine and trainer.num_nodes to the machines",
                )
            self.is_first = dist.get_rank() == 0
            shared = [str(self.run_dir.root)]
            dist.broadcast_object_list(shared, src=0)
            self.run_dir = RunDirectory(Path(shared[0]))
        elif self.settings.trainer.num_nodes > 1:
            raise ConfigError(
                key="trainer.num_nodes",
                got=self.settings.trainer.num_nodes,
                because="this process was started alone, and several machines need torchrun or srun",
                fix="Use torchrun --nnodes=... train.py ..., or trainer.num_nodes=1",
            )

    # ---- before anything is loaded

    @cached_property
    def hf_config(self) -> PreTrainedConfig:
        """The model's own description."""
        return load_model_config(self.settings.model)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.settings.model)

    @cached_property
    def supply(self) -> Supply:
        """What the run learns from."""
        return SUPPLIES[self.settings.supply](self.settings, self.tokenizer, self.hf_config)

    @cached_property
    def val_prompts(self) -> Sequence[Prompt]:
        """Held-out prompts; none where the data has none."""
        s = self.settings
        if not s.data.has_validation or s.reward is None:
            return []
        prompts = load_prompts(s.data, self.tokenizer, "test", s.task)
        prompts.refuse(s.reward.lacks)
        return prompts

    def check(self) -> None:
        """Everything that can be said without weights.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        self.check_strategy()
        layout = self.layout
        check(self.settings, self.hf_config, layout)
        if self.settings.model.value == SEPARATE:
            check_value_model(self.settings, self.hf_config, load_model_config(self.critic_model, "critic"), layout)
        check_teacher(self.settings, self.hf_config, self.tokenizer)
        if self.settings.model.compile:
            check_compiler(self.device)
        if self.settings.model.activation_offload:
            check_offload(self.device)
        self.supply.check(layout)
        _ = self.val_prompts  # reading them checks them
        self.resume_from(say=lambda line: print(line) if self.is_first else None)

    def check_strategy(self) -> None:
        """Refuse a strategy that this machine or this model cannot have.

        Raises:
            RLModuleError: what is wrong and what to do about it.
        """
        strategy, mode = self.new_strategy(), self.settings.model.activation_checkpointing
        if mode == SELECTIVE and strategy.works_inside_blocks:
            raise ConfigError(
                key="model.activation_checkpointing",
                got=mode,
                because=f"strategy={self.settings.backend} gathers weights inside blocks, which cannot be told apart "
                "from what is to be kept",
                fix="Use model.activation_checkpointing=full",
            )
        check_layout(self.hf_config, self.layout)

    def resume_from(self, say: Callable[[str], object] = lambda line: None) -> Path | None:
        """The checkpoint to go on from; None starts at the beginning.

        Args:
            say: is given a line for every newer checkpoint that is damaged.

        Raises:
            CheckpointError: the checkpoint asked for is damaged.
        """
        wanted = self.settings.run.resume
        if not wanted:
            return None
        if Path(wanted).parent.name == "checkpoints":
            verify(Path(wanted))
            return Path(wanted).absolute()
        found, passed_over = newest_whole(self.run_dir.checkpoints)
        for line in passed_over:
            say(f"resume: {line}")
        return found

    def write_down(self, config: str, provenance: str) -> None:
        """Save what is run; the first rank's job."""
        if self.is_first:
            self.run_dir.root.mkdir(parents=True, exist_ok=True)
            if self.settings.run.resume and self.run_dir.config.exists():
                for line in changes(self.run_dir.config.read_text(), config):
                    print(f"resume: this run goes on with {line}")
            self.run_dir.config.write_text(config)
            with (self.run_dir.root / "command.txt").open("a") as file:
                file.write(provenance)

    # ---- starting weights

    def warm_start(self, alone: Callable[[Path], None]) -> None:
        """Make the starting weights of a random model, once per run directory.

        Args:
            alone: makes them in a process of its own, where this one has peers.
        """
        if not self.settings.needs_warm_start or self._warm_start_is_there:
            return
        if not launched_from_outside():
            self.fit_warm_start()
            return
        if self.is_first:
            alone(self.run_dir.root)
        dist.barrier()

    def fit_warm_start(self) -> None:
        """Imitate demonstrations with the random model, on one process whatever the layout of the run."""
        inner = RunDirectory(self._warm_start_dir)
        inner.root.mkdir(parents=True, exist_ok=True)
        print(
            f"warm start: {self.settings.warm_start.steps} steps of imitation, so that there is something to reinforce"
        )
        Session(self.settings.for_warm_start(), inner, self.menu).fit()
        self._warm_start_stamp.write_text(self._warm_start_key)

    @property
    def _warm_start_is_there(self) -> bool:
        return self._warm_start_stamp.exists() and self._warm_start_stamp.read_text() == self._warm_start_key

    @property
    def _warm_start_stamp(self) -> Path:
        return self._warm_start_dir / "made_from.sha256"

    @property
    def _warm_start_dir(self) -> Path:
        shared = self.settings.warm_start.shared
        return self.run_dir.warm_start if shared is None else Path(shared).absolute() / self._warm_start_key[:16]

    @property
    def _warm_start_key(self) -> str:
        s = self.settings
        warm = s.for_warm_start()  # without what says nothing of the demonstrations
        parts = [asdict(s.model), asdict(warm.data), asdict(replace(s.warm_start, shared=None)), s.run.seed]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    # ---- the run

    def fit(self) -> None:
        """Build the parts and train; every rank of the run calls it."""
        quieten()
        settings = self.settings
        if settings.needs_warm_start:
            warm = Session(
                settings.starting_from(str(self._warm_start_dir / "policy")),
                self.run_dir,
                self.menu,
                self.strategy_node,
            )
            warm.is_first = self.is_first
            warm.fit()
            return
        torch.set_num_threads(settings.trainer.num_threads or max(1, min(2, os.cpu_count() or 1) // self.num_processes))
        checkpoint = self.resume_from()
        step = None if checkpoint is None else int(read_manifest(checkpoint).facts["step"])
        objective = Objective(settings.loss, settings.algorithm)
        module, strategy = self.new_module(objective), self.new_strategy()
        context = self._context(module.models[settings.leading_model], step)
        callbacks = [made.connect(context) for made in settings.callbacks.values()]
        datamodule = self._datamodule(objective, strategy, context.journal.begin_iteration)
        with interrupts_kept():
            self.trainer(strategy, callbacks, step, context.hparams).fit(
                module,
                datamodule=datamodule,
                ckpt_path=None if checkpoint is None else checkpoint / STATE_FILE,
                weights_only=True,
            )
        if context.is_first and "report" not in settings.callbacks:
            print(f"run finished {self.run_dir.root}")

    def result(self) -> float | None:
        """Accuracy on held-out prompts at the end, for sweeps; None where none was measured."""
        if not self.run_dir.summary.exists():
            return None
        value = json.loads(self.run_dir.summary.read_text()).get("val_accuracy_end")
        return None if value is None else float(value)

    def new_module(self, objective: Objective) -> RLModule:
        """The models of the run, with what trains them."""
        make = self._reward_model if self.settings.model.value == ONLY else self._policy
        models, minimised = make(objective)
        trainables = [
            Trainable(name, of_model, optimizer, self.settings.run_steps(self.supply.samples_per_row, name))
            for name, (of_model, optimizer) in minimised.items()
        ]
        return RLModule(models, trainables, max_skipped_in_a_row=self.settings.trainer.max_skipped_in_a_row)

    def _reward_model(self, objective: Objective) -> tuple[dict[str, nn.Module], Minimised]:
        """A value model by itself, which gives the scores that the objective wants."""
        settings = self.settings
        model = outline_value_model(self.critic_model, seed=settings.run.seed, section="model")
        return {CRITIC: model}, {CRITIC: (objective, settings.optimizer)}

    def _policy(self, objective: Objective) -> tuple[dict[str, nn.Module], Minimised]:
        """The policy and what stands beside it: frozen reference, teacher, value model."""
        settings, seed = self.settings, self.settings.run.seed
        of_values = CriticObjective(settings.critic, settings.algorithm)
        policy = outline_policy(settings.model, seed=seed, temperature=settings.rollout.temperature)
        if settings.model.value == SHARED:
            policy = with_value_head(policy, settings.model.path)
        models: dict[str, nn.Module] = {POLICY: policy}
        if objective.needs_reference and policy.lora is None:
            models[REFERENCE] = frozen_copy(policy)
        if settings.algorithm.teacher is not None:
            made = outline_policy(teacher_model(settings), seed=seed, temperature=settings.rollout.temperature)
            models[TEACHER] = frozen(made)
        minimised: Minimised = {POLICY: (objective, settings.optimizer)}
        if settings.model.value == SHARED:
            minimised[POLICY] = (JointObjective(objective, of_values), settings.optimizer)
        if settings.model.value == SEPARATE:
            models[CRITIC] = outline_value_model(self.critic_model, seed=seed)
            minimised[CRITIC] = (of_values, settings.critic.optimizer)
        return models, minimised

    @property
    def critic_model(self) -> ModelConfig:
        """What a value model of its own is."""
        critic = self.settings.critic
        return value_config(self.settings.model, critic.path, critic.architecture)

    def trainer(
        self,
        strategy: Any,
        callbacks: list[L.Callback],
        resumed_step: int | None,
        hparams: Mapping[str, object] = MappingProxyType({}),
    ) -> L.Trainer:
        """Lightning's trainer, set up for this run; ``hparams`` go into TensorBoard's ``hparams.yaml``."""
        settings = self.settings
        writer: EventLog | bool = False
        if settings.logger == "tensorboard":
            writer = EventLog(
                self.run_dir.root,
                name="tensorboard",
                version="",
                default_hp_metric=False,
                purge_step=purge_step(resumed_step),
            )
            writer.hparams.update(hparams)
        return L.Trainer(
            accelerator="gpu" if self.device == "cuda" else self.device,
            devices=self.num_processes,
            num_nodes=settings.trainer.num_nodes,
            strategy=strategy,
            max_epochs=settings.trainer.max_epochs,
            callbacks=callbacks,
            logger=writer,
            log_every_n_steps=1,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_checkpointing=any(name == "checkpoint" for name in settings.callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def _context(self, policy: nn.Module, resumed_step: int | None) -> RunContext:
        s = self.settings
        name = s.model.path or str(s.model.architecture.get("model_type"))
        devices = f"{self.world_size} {self.device} process{'es' if self.world_size > 1 else ''}"
        plan = RunPlan(
            s,
            self.layout,
            ModelFacts(name, parameter_count(policy), str(policy.loading)),
            devices,
            self.supply.describe(),
            self.supply.describe_iteration(),
            self.supply.samples_per_row,
        )
        is_first = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")))) == 0
        return RunContext(
            run_dir=self.run_dir.root,
            is_first=is_first,
            max_iterations=s.trainer.max_epochs,
            describe=plan.lines(),
            hparams=flat(
                {
                    "optimizer": asdict(s.optimizer),
                    "algorithm": asdict(s.algorithm),
                    "batching": asdict(s.batching),
                    "rollout": asdict(s.rollout),
                    "seed": s.run.seed,
                }
            ),
            resumed_step=resumed_step,
            val_prompts=self.val_prompts,
            tokenizer=self.tokenizer,
            sampling={name: getattr(s.rollout, name) for name in ("temperature", "top_k", "top_p")},
        )

    def _datamodule(self, objective: Objective, strategy: Any, start: Callable[[int], None]) -> RLDataModule:
        s = self.settings
        stream = PromptStream(len(self.supply), s.run.seed, s.data.shuffle)
        layout = lambda: strategy.layout  # noqa: E731  known once the strategy is set up

        def engine() -> RolloutEngine:
            return s.rollout.connect(
                partial(strategy.generator, "policy"),
                partial(strategy.generation_mode, "policy"),
                self.tokenizer,
                strategy.root_device,
            )

        controller = KLController(s.algorithm.kl_in_reward) if s.algorithm.use_kl_in_reward else None
        return RLDataModule(
            self.supply.source(stream, layout, engine),
            stream,
            partial(
                self.maker,
                objective,
                strategy,
                kl_controller=controller,
                reference_scores=None if s.algorithm.is_sampled else ReferenceScores(),
            ),
            examine=Examination(self.val_prompts, engine, s.reward, layout) if s.reward and self.val_prompts else None,
            kl_controller=controller,
            replay=ReplayMemory(s.replayed),
            start=start,
        )

    def maker(
        self,
        objective: Objective,
        strategy: Any,
        iteration: int,
        *,
        kl_controller: KLController | None = None,
        reference_scores: ReferenceScores | None = None,
    ) -> ExperienceMaker:
        """Turns the samples of one iteration into mini-batches."""
        s = self.settings
        layout = strategy.layout
        pad = self.tokenizer.pad_token_id
        cost = Workload(shape_of(self.hf_config))

        def make_sampler(metas: Sequence[SampleMeta]) -> BalancedSampler:
            return BalancedSampler(
                metas,
                s.batching,
                layout,
                seed=s.run.seed,
                iteration=iteration,
                epochs=s.algorithm.ppo_epochs,
                cost=cost,
                trains=s.trains_in(iteration),
            )

        collator = DynamicCollator(
            0 if pad is None else pad, layout.sp_size, layout.sp_rank, share_prompts=s.batching.share_prompts
        )
        return ExperienceMaker(
            strategy,
            objective,
            s.advantage,
            collator,
            make_sampler,
            strategy.root_device,
            reference_in_policy=s.model.lora.is_on,
            kl_controller=kl_controller,
            value_model=s.value_model,
            reference_scores=reference_scores,
        )


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Ctrl-C stays Ctrl-C: Lightning makes an exit with code 1 of it."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise end.__context__ from None
        raise


def changes(before: str, after: str) -> list[str]:
    """Settings in which two configurations (YAML) differ; where a run writes and what it resumes is left out."""
    old, new = (flat({"": OmegaConf.to_container(OmegaConf.create(text))}) for text in (before, after))
    names = sorted(name for name in old | new if old.get(name) != new.get(name))
    shown = {name.removeprefix("."): name for name in names}
    return [f"{k}={new.get(n)}, it was {old.get(n)}" for k, n in shown.items() if k not in ("resume", "run_dir")]


def frozen_copy(model: nn.Module) -> nn.Module:
    """A model of the same weights that never trains and shares nothing with the original."""
    return frozen(copy.deepcopy(model))


def frozen(model: nn.Module) -> nn.Module:
    """The model itself, which never trains from now on."""
    model.requires_grad_(False)
    return model.eval()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as dotted keys with plain values, as TensorBoard's hparams want them."""
    out: dict[str, str | int | float | bool] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value if isinstance(value, (str, int, float, bool)) else str(value)
    return out


def join_process_group() -> None:
    """Meet the ranks that torchrun or srun started; Lightning takes the group over."""
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
        return
    slurm = SLURMEnvironment()
    address = f"tcp://{slurm.main_address}:{slurm.main_port}"
    dist.init_process_group(backend, init_method=address, rank=slurm.global_rank(), world_size=slurm.world_size())


def quieten() -> None:
    """Keep advice that does not apply here off the terminal."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if not torch.accelerator.is_available():  # transformers imports DeepSpeed on export, which says so aloud
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for advice in (
        ".*module.s. in eval mode at the start.*",  # a reference model is meant to be
        ".*is_gradient_checkpointing. is deprecated.*",  # peft 0.21 on transformers 5.24
        ".*isinstance.treespec, LeafSpec.*",  # Lightning 2.6 on torch 2.13
    ):
        warnings.filterwarnings("ignore", message=advice)
