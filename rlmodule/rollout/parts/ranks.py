"""How ranks ask servers as one: of those that have the same tokens one asks, and hands on what it was given.

Leaves out what is asked (``server_engine.py``, ``server_requests.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

from rlmodule.core.contract import Strategy
from rlmodule.core.episodes import Completion, GenerationRequest
from rlmodule.core.errors import EnginesGoneError, RLModuleError, TrainingError, in_one_line
from rlmodule.rollout.parts.http_client import ServerGoneError, ServerRefusedError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RankGroup:
    """Every rank of a run calls each of these.

    Args:
        strategy: knows where this rank is, and exchanges what ranks have.
    """

    strategy: Strategy

    def gather(self, item: T) -> list[T]:
        """The item of every rank, on every rank."""
        return self.strategy.gather_from_all(item)

    def on_first(self, work: Callable[[], T], reads: Iterable[object] = ()) -> T:
        """What ``work`` gives on the first rank, on every rank."""
        return self._from(0, work, reads)

    def _from(self, rank: int, work: Callable[[], T], reads: Iterable[object] = ()) -> T:
        """What ``work`` gives on one rank, on every rank that names the same; every rank calls it.

        Args:
            rank: where it is called.
            work: is called there alone.
            reads: a stream that ``work`` reads and that every rank must read to its end, also where ``work`` fails.

        Raises:
            RLModuleError: on every such rank, when it failed.
        """
        outcome: list[T] = []
        problem: RLModuleError | None = None
        try:
            if self.strategy.layout.rank == rank:
                outcome.append(work())
        except RLModuleError as error:
            problem = error
        except (OSError, ServerGoneError, ServerRefusedError) as error:
            problem = TrainingError(f"the rollout servers cannot be used: {in_one_line(error)}")
        for _ in reads:
            pass
        told = problem if problem is None or isinstance(problem, EnginesGoneError) else TrainingError(str(problem))
        outcomes, first = self.strategy.gather_from_all((outcome, told))[rank]
        if problem is not None or first is not None:
            raise problem or first  # type: ignore[misc]  # one of them is there
        return outcomes[0]

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of all, which looks after the servers."""
        return self.strategy.layout.is_rank_zero

    @property
    def is_leader(self) -> bool:
        """Whether this rank asks."""
        return self._leader == self.strategy.layout.rank

    def shared(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the rank that asks, also where its tokens are repeated."""
        return self._from(self._leader, work) if self._is_repeated else work()

    @property
    def _leader(self) -> int:
        """The rank that asks for this one: the first of those that have the same tokens."""
        layout = self.strategy.layout
        return layout.rank - layout.pp_rank * layout.stage_size - layout.tp_rank

    @property
    def _is_repeated(self) -> bool:
        layout = self.strategy.layout
        return layout.tp_size * layout.pp_size > 1

    def stream(self, completions: Generator[Completion, None, None]) -> Generator[Completion, None, None]:
        """The completions, and at their end all of them to the ranks that repeat this one's tokens."""
        if not self._is_repeated:
            yield from completions
            return
        kept, problem = list[Completion](), None
        try:
            for completion in completions:
                kept.append(completion)
                yield completion
        except RLModuleError as error:
            problem = error
        except GeneratorExit:
            self.strategy.gather_from_all((kept, TrainingError("the rank that asks has stopped reading")))
            raise
        told = problem if problem is None or isinstance(problem, EnginesGoneError) else TrainingError(str(problem))
        self.strategy.gather_from_all((kept, told))
        if problem is not None:
            raise problem

    def handed(self, requests: Iterable[GenerationRequest | None]) -> Generator[Completion, None, None]:
        """The same from the rank that asked, in the same order; requests are read so that episodes go on."""
        everyone: list[tuple[list[Completion], RLModuleError | None]]
        everyone = self.strategy.gather_from_all(([], None))
        kept, problem = everyone[self._leader]
        waiting = iter(requests)
        for completion in kept:
            while next(waiting, None) is not None:
                pass
            yield completion
        while next(waiting, None) is not None:
            pass
        if problem is not None:
            raise problem
