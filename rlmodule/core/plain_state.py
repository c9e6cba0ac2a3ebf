"""A nested state as JSON and a few flat tensors, and back, without pickle: reading a stranger's state runs no code.

A state is made of None, bool, int, float, str, bytes, dates, times, decimals, tensors, and of lists, tuples and
mappings of these. Tensors of one dtype are laid end to end in one flat tensor, and the JSON says where each begins, so
100,000 small tensors are stored as a handful. Leaves out files (``strategies/parts/snapshot.py``) and the project's own
types (``checkpoint/samples.py``).
"""

from __future__ import annotations

import base64
import datetime
import math
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A JSON object with this key stands for a value that JSON has no form for; the key's value names the kind.
KIND = "$"

_MICROSECOND = datetime.timedelta(microseconds=1)

# Kind -> (type, value -> text, text -> value). A type stands before those that it is derived from.
_AS_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    # Timestamps of nanoseconds are cut to microseconds, which is what Python's own type holds.
    "datetime": (datetime.datetime, lambda v: v.isoformat(timespec="microseconds"), datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda value: value.isoformat(), datetime.date.fromisoformat),
    "time": (datetime.time, lambda value: value.isoformat(timespec="microseconds"), datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda v: str(v // _MICROSECOND), lambda text: int(text) * _MICROSECOND),
    "decimal": (Decimal, str, Decimal),
    "uuid": (uuid.UUID, str, uuid.UUID),
}


def split_state(state: object) -> tuple[Any, dict[str, Tensor]]:
    """Separate a nested state into what JSON can hold and its tensors.

    Returns:
        (document for ``json.dumps``, dtype -> flat tensor in host memory).

    Raises:
        TypeError: a value has no such form; names where in the state it stands.
    """
    writer = _Writer()
    document = writer.encode(state, "state")
    return document, {dtype: torch.cat(parts) for dtype, parts in writer.parts.items()}


def join_state(document: object, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of ``split_state``.

    Raises:
        ValueError: the two do not fit together, or were not made by ``split_state``.
    """
    try:
        return _decode(document, tensors)
    except (KeyError, TypeError, RuntimeError, ArithmeticError) as error:  # RuntimeError: torch's, and too deep nesting
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Writer:
    """Collects the tensors of a state while it is encoded."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self._ends: dict[str, int] = {}

    def encode(self, value: object, path: str) -> Any:
        """``value``, which stands at ``path``, as JSON has it."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {KIND: "float", "text": repr(float(value))}
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {KIND: "tuple", "items": items}
        for kind, (type_, to_text, _) in _AS_TEXT.items():
            if isinstance(value, type_):
                return {KIND: kind, "text": to_text(value)}
        raise TypeError(f"{path} is of type {type(value).__name__}, which a checkpoint has no form for")

    def _encode_mapping(self, value: Mapping[Any, object], path: str) -> dict[str, Any]:
        if KIND not in value and all(isinstance(key, str) for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        pairs = [[self.encode(key, path), self.encode(item, f"{path}.{key}")] for key, item in value.items()]
        return {KIND: "mapping", "items": pairs}

    def _encode_tensor(self, tensor: Tensor) -> dict[str, Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        start = self._ends.get(dtype, 0)
        self.parts.setdefault(dtype, []).append(tensor.detach().cpu().flatten())
        self._ends[dtype] = start + tensor.numel()
        return {KIND: "tensor", "dtype": dtype, "start": start, "shape": list(tensor.shape)}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind = value[KIND]
    if kind == "float":
        return float(value["text"])
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in value["items"])
    if kind == "mapping":
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]}
    if kind == "tensor":
        return _decode_tensor(tensors[value["dtype"]], value["start"], value["shape"])
    _, _, from_text = _AS_TEXT[kind]
    return from_text(value["text"])


def _decode_tensor(flat: Tensor, start: int, shape: list[int]) -> Tensor:
    end = start + math.prod(shape)
    if not 0 <= start <= end <= len(flat):
        raise ValueError(f"elements {start} to {end} of {len(flat)}")
    return flat[start:end].reshape(shape).clone()
