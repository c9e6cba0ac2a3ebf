"""Lightning's trainer as a run wants it: its loops and its strategy, none of its own logging, bars and checkpoints."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy as LightningStrategy
from transformers.utils import logging as transformers_logging

from rlmodule.core.contract import Strategy
from rlmodule.loggers import LoggedRun
from rlmodule.records.run_directory import RunDirectory
from rlmodule.run.build.accelerators import accelerator_of
from rlmodule.run.build.distributed import cluster_of
from rlmodule.run.build.machine import Machine
from rlmodule.run.config import RunConfig


def build_trainer(
    config: RunConfig,
    machine: Machine,
    run_dir: RunDirectory,
    strategy: Strategy,
    callbacks: list[L.Callback],
    *,
    logged: LoggedRun | None = None,
) -> L.Trainer:
    """Build Lightning's trainer for this run; ``logged`` is what loggers are told, None where there are none."""
    assert isinstance(strategy, LightningStrategy), "a strategy stands on one of Lightning's"
    loggers = [logger.connect(logged or LoggedRun(run_dir.root)) for logger in config.loggers.values()]
    trainer = L.Trainer(
        accelerator=accelerator_of(machine.device),
        devices=machine.num_processes,
        num_nodes=config.trainer.num_nodes,
        strategy=strategy,
        plugins=[cluster_of(machine)],
        max_epochs=config.trainer.max_epochs,
        callbacks=callbacks,
        logger=loggers,
        log_every_n_steps=1,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=any(name == "checkpoint" for name in config.callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Lightning answers SIGTERM with a collective inside the signal handler, which hangs ranks that are elsewhere; what
    # a signal means here is in core/preemption.py.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


@contextmanager
def reraise_keyboard_interrupt() -> Iterator[None]:
    """Ctrl-C stays Ctrl-C: Lightning makes an exit with code 1 of it."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise end.__context__ from None
        raise


def silence_warnings() -> None:
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
