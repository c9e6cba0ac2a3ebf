"""What is known of samples as columns: nothing is lost on the way to them, to other ranks, and back."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.types import SampleMeta
from rlmodule.experience.advantage_stage import PerResponse
from rlmodule.experience.iteration_metrics import reward_metrics
from rlmodule.experience.packed_columns import JoinedColumns, PackedColumns
from rlmodule.experience.sample_info import SampleInfo
from rlmodule.experience.sample_table import SampleTable

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 0.1, 1e300, np.nan, np.inf, 5e-324]) | st.floats(width=32)
SAMPLES = [
    SampleInfo(SampleMeta(7, 3, 2, 5, 5), 1.0, {"format": 0.5}, truncated=True, counts={"failed": 1.0}),
    SampleInfo(SampleMeta(2, 1, 4, 1, 0, is_padding=True), None, {}, truncated=False, version=2),
    SampleInfo(SampleMeta(5, 3, 2, 9, 8, has_gradient=False), -0.25, {}, truncated=False, baseline=0.5, failure=""),
    SampleInfo(SampleMeta(9, 4, 1, 1, 1), 0.5, {"format": 1.0}, truncated=False, diagnostics={"x": 2.0}, failure="no"),
]


def test_columns_give_the_samples_back():
    table = SampleTable.of(SAMPLES)
    assert list(table) == SAMPLES
    assert list(pickle.loads(pickle.dumps(table, protocol=5))) == SAMPLES
    assert list(table[1:3]) == SAMPLES[1:3]
    assert SampleTable.of(table) is table
    assert len(SampleTable.of([])) == 0


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_tables_joined_are_the_table_of_all_in_the_order_of_their_ids(cut):
    joined = SampleTable.joined([SampleTable.of(SAMPLES[:cut]), SampleTable.of(SAMPLES[cut:])])
    assert list(joined) == SAMPLES
    assert joined.positions_of([9, 7]) == [3, 0]


@pytest.mark.parametrize("cuts", [(0, 0), (1, 1), (1, 3), (2, 4)])
def test_what_ranks_tell_each_other_is_the_table_of_all_by_sample_id(cuts):
    """A rank without samples, and one without a component that others have, are among them."""
    parts = [SampleTable.of(SAMPLES[start:end]) for start, end in zip((0, *cuts), (*cuts, 4), strict=True)]
    told = [pickle.loads(pickle.dumps(part.packed(), protocol=5)) for part in parts]
    assert list(SampleTable.gathered(told)) == sorted(SAMPLES, key=lambda info: info.meta.sample_id)


@given(st.lists(st.lists(NUMBERS, max_size=6), min_size=1, max_size=4))
def test_columns_travel_bit_for_bit(parts):
    """Of each number its bits, also those of -0.0 and of not-a-number."""
    columns = [
        {"float": np.array(part), "flag": np.array(part) > 0, "id": np.array(part).view(np.int64)} for part in parts
    ]
    if any(len(part) for part in parts[1:]):
        columns[0].pop("flag")
    joined = JoinedColumns([PackedColumns.of(one) for one in columns])
    for name in ("float", "flag", "id"):
        lacking = [np.zeros(len(part), bool) for part in parts]
        whole = np.concatenate([one.get(name, zeros) for one, zeros in zip(columns, lacking, strict=True)])
        assert joined[name].tobytes() == whole.tobytes()
        assert len(whole) == 0 or joined[name].dtype == whole.dtype


@pytest.mark.parametrize(
    ("column", "most_bytes"),
    [
        (np.full(1000, np.nan), 0),
        (np.arange(5_000_000_000, 5_000_001_000), 2000),
        (np.arange(1000, dtype=np.int32) % 200, 1000),
        (np.arange(1000) % 2 == 0, 1000),
        (np.arange(1000) / 4, 4000),
    ],
    ids=["equal", "ids", "counts", "flags", "quarters"],
)
def test_a_column_takes_no_more_bytes_than_its_numbers_need(column, most_bytes):
    packed = PackedColumns.of({"column": column})
    assert len(packed.data) == most_bytes
    assert JoinedColumns([packed])["column"].tobytes() == column.tobytes()


def test_a_number_that_is_not_one_stays_in_the_means_of_those_who_have_it():
    """A sample without a component of the reward is not one whose component is NaN."""
    told = [replace(SAMPLES[0], parts={"format": np.nan}), SAMPLES[2]]
    assert np.isnan(reward_metrics(told)["reward/format"])
    assert reward_metrics([SAMPLES[0], SAMPLES[2]])["reward/format"] == 0.5


def test_numbers_of_responses_end_to_end():
    values = PerResponse(torch.tensor([0.0, 1.0, 3.0, 0.0, 1e-60], dtype=torch.float64), torch.tensor([1, 2, 0, 2]))
    assert [values[i].tolist() for i in range(4)] == [[0.0], [1.0, 3.0], [], [0.0, 1e-60]]
    assert values.is_zero.tolist() == [True, False, True, True], "as float32"
    assert values.means.tolist() == pytest.approx([0.0, 2.0, np.nan, 5e-61], nan_ok=True, abs=0)
