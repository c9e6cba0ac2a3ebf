"""Which class runs which kind of model on which machine.

A backend is a module of this package (``strategies/ddp.py``) or an entry point of the group ``rlmodule.strategies``. It
is imported, and its optional packages with it, when a run chooses it.

A new backend is ``strategies/NAME.py`` and ``conf/strategy/NAME.yaml``. The module has a frozen dataclass with the
backend's keys and a class that ``@STRATEGIES.register(...)`` registers, ``config_class`` set to the former:

- on ``DistributedStrategy`` (every process holds whole weights), ``ShardedStrategy`` (weights are cut) or
  ``PipelinedStrategy`` (models may be cut into stages, too; ``wrap`` begins with ``cut_into_stages``);
- ``wrap`` reads the weights of one model and cuts or wraps it, ``check_model`` refuses one that it cannot be;
- ``micro_batch`` syncs gradients after the last one only, or ``reduce_gradients`` once after all;
- ``build``, where its layers are not those of Hugging Face;
- ``forward_backward``, ``evaluate`` and ``forward``, where micro-batches do not run one after the other (a pipeline's
  do in ``PipelinedStrategy``; ``Pipeline`` alone is its schedule, for stages of any kind);
- ``named_parameters``, ``full_parameters``, ``copies_of``, ``state_dict_to_save`` and ``load_state_dict``, where
  parameters have other names or are no DTensors.

``rlmodule.core.contract.Strategy`` says what each must do. Leaves out everything that a strategy does.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import TypeVar

from rlmodule.core.backends import BackendStatus
from rlmodule.core.contract import LANGUAGE_MODEL, POLICY_VALUE, VALUE_MODEL, StrategyClass
from rlmodule.core.devices import ANY_VENDOR, device_here, vendor_here
from rlmodule.core.errors import ConfigError, DependencyError, RLModuleError, did_you_mean, in_one_line
from strategies.parts.adaptors import import_adaptor
from strategies.parts.requirements import OWN, unmet

C = TypeVar("C", bound=StrategyClass)
ENTRY_POINT_GROUP = "rlmodule.strategies"
MODEL_TYPES = (LANGUAGE_MODEL, VALUE_MODEL, POLICY_VALUE)

Key = tuple[str, str, str, str | None]
Words = str | Iterable[str]


def as_tuple(words: Words | None) -> tuple[str | None, ...]:
    """A word, several or none, as a tuple."""
    return (words,) if words is None or isinstance(words, str) else tuple(words)


@dataclass
class StrategyRegistry:
    """(model_type, backend, device, vendor) -> strategy class.

    Args:
        package: whose modules are the backends.
    """

    package: str = "strategies"
    _table: dict[Key, StrategyClass] = field(default_factory=dict)

    def register(
        self, *, model_type: Words, backend: Words, device: Words, vendor: Words | None = ANY_VENDOR
    ) -> Callable[[C], C]:
        """Class decorator; each argument is a word or several. All combinations are registered, or none.

        Raises:
            ValueError: a combination is taken; names both classes.
        """
        keys: list[Key] = [
            (str(m), str(b), str(d), v)
            for m, b, d, v in itertools.product(*map(as_tuple, (model_type, backend, device, vendor)))
        ]

        def file(strategy: C) -> C:
            for key in keys:
                taken = self._table.get(key)
                if taken is not None:
                    raise ValueError(f"{key} is already {_name(taken)}; {_name(strategy)} cannot take it")
            if len(set(keys)) < len(keys):
                raise ValueError(f"{_name(strategy)} names the same combination twice: {keys}")
            self._table.update(dict.fromkeys(keys, strategy))
            return strategy

        return file

    def __reduce__(self) -> str:
        """Pickled by name: another process has a registry of its own."""
        return "STRATEGIES"

    def backends(self) -> list[str]:
        """Names of every backend that can be chosen, without importing any."""
        paths = importlib.import_module(self.package).__path__
        here = {m.name for m in pkgutil.iter_modules(paths) if not m.ispkg and m.name != "registry"}
        return sorted(here | {key[1] for key in self._table} | {p.name for p in entry_points(group=ENTRY_POINT_GROUP)})

    def lookup(
        self, model_type: str, backend: str, *, device: str | None = None, vendor: str | None = None
    ) -> StrategyClass:
        """The class for this machine: of its device and vendor, else for any vendor, else nvidia's on CUDA devices.

        Args:
            model_type: one of ``MODEL_TYPES``.
            backend: name from ``backends()``.
            device, vendor: None takes ``RLMODULE_DEVICE`` and ``RLMODULE_VENDOR``, or what the machine has.

        Raises:
            ConfigError: nothing fits; lists what is registered.
            DependencyError: the backend needs a package that is not installed.
        """
        device = device or device_here()
        vendor = vendor or vendor_here(device)
        import_adaptor(backend, device, vendor)
        self._import(backend)
        tries: list[tuple[str, str | None]] = [(device, vendor), (device, ANY_VENDOR)]
        if device == "cuda" and vendor != "nvidia":
            tries.append(("cuda", "nvidia"))
        for place in tries:
            found = self._table.get((model_type, backend, *place))
            if found is not None:
                return found
        raise self._nothing(model_type, backend, device, vendor)

    def status(self, backend: str) -> BackendStatus:
        """What a run that chooses the backend would get here, and why where it would get nothing; imports it.

        Device and vendor are those of ``lookup``.
        """
        points = () if self._has(backend) else entry_points(group=ENTRY_POINT_GROUP, name=backend)
        point = next(iter(points), None)
        found: dict[str, str] = {}
        problem = unmet(backend, point)
        if problem is None:
            problem = self._resolve(backend, found)
        places = {
            model_type: tuple((d, v) for m, b, d, v in self._table if (m, b) == (model_type, backend))
            for model_type in sorted({m for m, b, *_ in self._table if b == backend})
        }
        brought_by = OWN if point is None or point.dist is None else point.dist.name
        return BackendStatus(backend, brought_by, places, found, problem)

    def _resolve(self, backend: str, found: dict[str, str]) -> str | None:
        """Fill in the class of each model type; returns what went wrong first."""
        problem = None
        for model_type in MODEL_TYPES:
            try:
                found[model_type] = _name(self.lookup(model_type, backend))
            except RLModuleError as error:
                problem = problem or str(error)
            except Exception as error:  # of a package that was imported
                return f"importing it failed ({in_one_line(error)})"
        registered = {m for m, b, *_ in self._table if b == backend}
        return problem if registered - found.keys() or not found else None

    def _has(self, backend: str) -> bool:
        """Whether it is a module of the package."""
        paths = importlib.import_module(self.package).__path__
        return any(m.name == backend for m in pkgutil.iter_modules(paths))

    def _import(self, backend: str) -> None:
        if self._has(backend):
            module = f"{self.package}.{backend}"
            _load(partial(importlib.import_module, module), backend, own=("rlmodule", self.package), extra=backend)
        elif not any(key[1] == backend for key in self._table):
            for point in entry_points(group=ENTRY_POINT_GROUP, name=backend):
                _load(point.load, backend, own=("rlmodule", point.module.partition(".")[0]))

    def _nothing(self, model_type: str, backend: str, device: str, vendor: str) -> ConfigError:
        if backend not in self.backends():
            return ConfigError(
                key="strategy",
                got=backend,
                because="no strategy has that name",
                fix=did_you_mean(backend, self.backends()),
            )
        known = [f"{m} on {d}" + (f"/{v}" if v else "") for m, b, d, v in self._table if b == backend]
        return ConfigError(
            key="strategy",
            got=backend,
            because=f"it is not registered for model_type={model_type} on device={device}, vendor={vendor}",
            fix=f"{backend} is registered for: {', '.join(sorted(known)) or 'nothing'}. "
            "RLMODULE_DEVICE and RLMODULE_VENDOR override what is detected",
        )


def _load(load: Callable[[], object], backend: str, *, own: Collection[str], extra: str = "") -> None:
    """Import a backend.

    Args:
        load: imports it.
        backend: its name.
        own: packages whose modules are there, so that a missing one is a bug.
        extra: of this project, which brings what it needs; empty for a backend of another package.

    Raises:
        DependencyError: a package that it needs is not installed.
    """
    try:
        load()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in own:
            raise
        alone = "" if extra else f"pip install {package}"
        needed_by = f"strategy={backend}"
        raise DependencyError(package=package, needed_by=needed_by, extra=extra, then=alone) from error


def _name(cls: StrategyClass) -> str:
    assert isinstance(cls, type)
    return f"{cls.__module__}.{cls.__qualname__}"


STRATEGIES = StrategyRegistry()
