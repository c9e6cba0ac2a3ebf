"""Tables by position: the first rows of several are what their names and places say."""

from hypothesis import given
from hypothesis import strategies as st

from rlmodule.data.tables import MemoryTable, TableChain, first_rows


def made(sizes):
    return [MemoryTable(f"{name}", [{"row": row} for row in range(size)]) for name, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(1, 700) | st.none())
def test_the_first_rows_of_several_tables_are_those_of_their_chain(sizes, limit):
    every = [(table.name, row) for table in made(sizes) for row in range(len(table))]
    kept = first_rows(made(sizes), limit)
    assert [(table.name, row["row"]) for table in kept for row in table.select(range(len(table)))] == every[:limit]
    assert [(t.name, row["row"]) for t in kept for batch in t.batches(["row"]) for row in batch] == every[:limit]
    chain = TableChain(kept) if kept else ()
    assert [chain.location(row) for row in range(len(chain))] == [f"{name}:{row + 1}" for name, row in every[:limit]]
