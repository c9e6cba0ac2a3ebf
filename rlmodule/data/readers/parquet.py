""".parquet files -> rows, one row group in memory at a time.

A file for shuffled training is best written in groups of a few MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from rlmodule.core.errors import DataError
from rlmodule.data.readers.content import Content
from rlmodule.data.readers.row_groups import RowGroups
from rlmodule.data.tables import BATCH_ROWS, RawRow


class ParquetTable(RowGroups):
    """A parquet file.

    Raises:
        DataError: it cannot be read.
    """

    def __init__(self, content: Content) -> None:
        try:
            # Without threads of Arrow's own: ranks may be forked after this.
            self._file = pq.ParquetFile(content.path, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                location=content.path, because=f"not a readable parquet file: {error}", fix="Write the file again"
            ) from None
        groups = range(self._file.num_row_groups)
        sizes = [self._file.metadata.row_group(group).num_rows for group in groups]
        super().__init__(str(content.path), self._file.schema_arrow, sizes, self._read_group)

    def batches(self, columns: Sequence[str]) -> Iterator[list[RawRow]]:
        for group in range(self._file.num_row_groups):  # one by one: buffers of a group are freed before the next
            part = {"row_groups": [group], "columns": list(columns), "use_threads": False}
            with self.errors_in_words():
                for batch in self._file.iter_batches(batch_size=BATCH_ROWS, **part):
                    yield self.plain(batch)

    def _read_group(self, group: int, columns: Sequence[str] | None) -> pa.Table:
        return self._file.read_row_group(group, columns=columns, use_threads=False)
