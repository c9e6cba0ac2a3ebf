"""A nested state comes back from JSON and flat tensors as it was, and whatever else stands there is refused."""

from __future__ import annotations

import datetime
import json
import math
import uuid
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmodule.core.plain_state import join_state, split_state

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def through_json(state):
    document, tensors = split_state(state)
    return join_state(json.loads(json.dumps(document, allow_nan=False)), tensors)


def is_same(a, b):
    """Equal in value and type, NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.double().nan_to_num(9), b.double().nan_to_num(9))
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = draw(st.lists(st.integers(0, 1), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(numbers).reshape(shape).to(draw(st.sampled_from(DTYPES)))


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.datetimes(timezones=st.none() | st.just(datetime.timezone(datetime.timedelta(hours=-3.5)))),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    tensors(),
)
KEYS = (
    st.text(st.characters(), max_size=3) | st.sampled_from(["$", "tensor"]) | st.integers() | st.tuples(st.booleans())
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)


@given(STATES)
def test_any_state_comes_back_as_it_was(state):
    assert is_same(through_json(state), state)


def test_tensors_of_a_type_are_one_tensor_on_disk():
    state = [torch.full((i,), float(i)) for i in range(50)] + [torch.arange(3)]
    _, flat = split_state(state)
    assert {name: tensor.shape for name, tensor in flat.items()} == {"float32": (1225,), "int64": (3,)}


def test_what_was_split_does_not_change_with_the_tensor():
    tensor = torch.zeros(3)
    document, flat = split_state({"a": tensor})
    tensor += 1
    assert join_state(document, flat)["a"].tolist() == [0, 0, 0]


def test_numbers_of_numpy_are_plain_numbers():
    assert through_json([np.float32(0.5), np.int64(3), np.bool_(True)]) == [0.5, 3, True]


def test_what_has_no_form_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"^state\.rows\[1\]\.image is of type object"):
        split_state({"rows": [{"image": 1}, {"image": object()}]})


@pytest.mark.parametrize(
    "document",
    [
        {"$": "tensor", "dtype": "float32", "start": 0, "shape": [4]},
        {"$": "tensor", "dtype": "float32", "start": -1, "shape": [1]},
        {"$": "tensor", "dtype": "float32", "start": 0, "shape": [-1]},
        {"$": "tensor", "dtype": "float32", "start": 0.0, "shape": [1]},
        {"$": "tensor", "dtype": "os", "start": 0, "shape": [1]},
        {"$": "system", "text": "ls"},
        {"$": ["unhashable"]},
        {"$": "float"},
        {"$": "mapping", "items": [[[], 1]]},
        {"$": "decimal", "text": "x"},
        {"$": "uuid", "text": "x"},
        {"$": "bytes", "text": "x"},
    ],
)
def test_a_document_that_was_not_made_here_is_refused(document):
    with pytest.raises(ValueError, match=r"\w"):
        join_state([document], {"float32": torch.zeros(3)})


def test_a_document_as_deep_as_a_well_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="RecursionError"):
        join_state(deep, {})


def test_columns_of_arrow_survive():
    """What a parquet file holds beside text and numbers."""
    pa = pytest.importorskip("pyarrow")
    moment = datetime.datetime(2026, 11, 30, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)
    row = {
        "decimal": Decimal("1.50"),
        "bytes": b"\x00\xff",
        "moment": moment,
        "day": moment.date(),
        "time": moment.time(),
        "span": datetime.timedelta(days=-1, microseconds=5),
        "list": [1, None],
        "struct": {"a": 1.5},
        "id": uuid.UUID(int=7).bytes,
    }
    [read] = pa.Table.from_pylist([row]).to_pylist()
    assert is_same(through_json(read), read)
    assert read["moment"] == moment
