"""Rows of Arrow tables as plain values that say what JSON lines would say.

Arrow knows one set of keys for all structs of a column and fills what a row lacks with null; decimals and 32-bit floats
have types of their own. Leaves out files (``files.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from rlmodule.core.text import plain_number

_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


class Converter:
    """Plain values of the rows of one table.

    Keys of structs that are null are left out, at every depth; null in a column of the table, or as an entry of a list,
    stays. Maps become mappings, decimals whole numbers or floats, and floats of 16 and 32 bits
    the number that was meant (0.1).

    Args:
        schema: of the table.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._kinds = {field.name: field.type for field in schema if _needs_conversion(field.type)}

    def __call__(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows as ``to_pylist`` gives them; converted in place."""
        for row in rows:
            row |= {name: _plain(row[name], kind) for name, kind in self._kinds.items() if name in row}
        return rows


def _needs_conversion(kind: pa.DataType) -> bool:
    kind = _without_wrapping(kind)
    if any(is_list(kind) for is_list in _LISTS):
        return _needs_conversion(kind.value_type)
    return any(
        is_one(kind)
        for is_one in (
            pa.types.is_struct,
            pa.types.is_map,
            pa.types.is_decimal,
            pa.types.is_float16,
            pa.types.is_float32,
        )
    )


def _plain(value: Any, kind: pa.DataType) -> Any:
    kind = _without_wrapping(kind)
    if isinstance(value, Decimal):
        return plain_number(value)
    if isinstance(value, float):
        meant = np.float16 if pa.types.is_float16(kind) else np.float32
        return value if pa.types.is_float64(kind) else float(str(meant(value)))
    if isinstance(value, Mapping):
        return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if isinstance(value, Sequence) and pa.types.is_map(kind):
        return {key: _plain(entry, kind.item_type) for key, entry in value}
    if isinstance(value, Sequence) and any(is_list(kind) for is_list in _LISTS):
        return [_plain(entry, kind.value_type) for entry in value]
    return value


def _without_wrapping(kind: pa.DataType) -> pa.DataType:
    """The type of the values, behind dictionary encoding and extensions."""
    if isinstance(kind, pa.BaseExtensionType):
        return _without_wrapping(kind.storage_type)
    return _without_wrapping(kind.value_type) if pa.types.is_dictionary(kind) else kind
