"""Muon: the numbers of ``torch.optim.Muon`` on matrices of blocks, those of AdamW on everything else."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from rlmodule.core.errors import ConfigError
from rlmodule.optim import OPTIMIZERS
from rlmodule.optim.adamw import AdamW
from rlmodule.optim.muon import Muon
from rlmodule.optim.parts.hidden import hidden_matrices
from rlmodule.optim.parts.orthogonal import orthogonalised
from rlmodule.optim.parts.schedule import build_schedule
from tests.helpers.tiny import tiny_policy


def stack():
    """Two blocks of a wide and a tall matrix between an embedding and a head."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False)) for _ in range(2)]
    return nn.ModuleDict({"embed": nn.Embedding(9, 4), "layers": nn.ModuleList(blocks), "head": nn.Linear(4, 9)})


def train(model, optimizer, steps=3, seed=1):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw)
        optimizer.step()


def test_matrices_of_blocks_are_named():
    assert hidden_matrices(stack()) == {f"layers.{i}.{j}.weight" for i in (0, 1) for j in (0, 2)}
    policy = tiny_policy()
    names = hidden_matrices(policy)
    assert names
    assert all(".layers." in name and name.endswith("proj.weight") for name in names)
    left = {name for name, _ in policy.named_parameters()} - names
    assert any("embed" in name for name in left)
    assert any("norm" in name for name in left)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scaling", "theirs"), [("adamw", "match_rms_adamw"), ("jordan", "original")])
def test_matrices_move_as_under_torchs_muon_and_the_rest_as_under_adamw(nesterov, scaling, theirs):
    mine, other = stack(), stack()
    config = Muon(lr=0.02, adamw_lr=0.003, weight_decay=0.1, nesterov=nesterov, scaling=scaling, dtype="bfloat16")
    names = hidden_matrices(other)
    by_name = dict(other.named_parameters())
    muon = torch.optim.Muon(
        [by_name[n] for n in names], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=theirs
    )
    rest = [(n, p) for n, p in other.named_parameters() if n not in names]
    adamw = AdamW(lr=0.003, weight_decay=0.1).build(rest, {"embed.weight", "head.weight"})
    train(mine, config.build_for(mine))

    class Both:
        def step(self):
            muon.step()
            adamw.step()

    train(other, Both())
    for name, p in mine.named_parameters():
        assert torch.equal(p, by_name[name]), name


def test_singular_values_come_near_one_in_any_shape_and_precision():
    for shape in ((5, 12), (12, 5), (8, 8), (1, 4)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.linalg.svdvals(orthogonalised(matrix, dtype).float())
            assert 0.3 < float(values.min()) <= float(values.max()) < 1.35, shape
    assert torch.equal(orthogonalised(torch.zeros(3, 2), torch.float32), torch.zeros(3, 2))


def test_one_schedule_multiplies_both_rates():
    model = stack()
    config = Muon(lr=0.02, adamw_lr=0.004, warmup_steps=4)
    optimizer = config.build_for(model)
    schedule = build_schedule(config, optimizer, run_steps=10)
    train(model, optimizer, 1)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.001, 0.001]
    before = deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items()), "both ways read it"


def test_only_adapters_train_under_lora():
    """Every adapter of a block is a matrix, so nothing may be left for AdamW."""
    model = stack()
    model.requires_grad_(False)
    model["layers"][0][0].weight.requires_grad_(True)
    optimizer = Muon(lr=1e-3).build_for(model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    train(model, optimizer, 1)
    nothing_hidden = nn.Sequential(nn.Linear(3, 2))
    assert len(Muon(lr=1e-3).build_for(nothing_hidden).param_groups) == 2, "AdamW alone: a weight and a bias"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"lr": -1.0}, "lr"),
        ({"adamw_lr": -1.0}, "adamw_lr"),
        ({"momentum": 1.5}, "momentum"),
        ({"scaling": "keller"}, "scaling"),
        ({"dtype": "float16"}, "dtype"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, key):
    with pytest.raises(ConfigError) as caught:
        Muon(**keys)
    assert caught.value.key == key


def test_the_optimizer_goes_by_the_name_of_its_file():
    assert OPTIMIZERS.get("muon") is Muon
