"""The house keeps its shape: who imports whom, which libraries live where, what menu folders hold, how files are named.

Reads the source with ``ast`` and imports nothing of it. The table of ``ARCHITECTURE.md``, for the tree as it is, stands
at the top as data; a new file has to find its place there.
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A unit is a package or a module right under rlmodule/. A layer may import those above it, never one beside it.
LAYERS = (
    {"core"},
    {"ops"},
    {"losses", "advantages", "batching", "optim"},
    {"models", "data", "environments", "rewards", "records", "checkpoint"},
    {"rollout", "algorithm"},
    {"training"},
    {"experience"},
    {"evaluation"},
    {"module", "datamodule"},
    {"loggers", "callbacks"},
    {"run"},
    {"parity"},
    {"commands"},
    {"cli"},
)
# Tighter than the layers: what maths and plans may see, whatever lies to their left.
ONLY = {
    "ops": {"core"},
    "batching": {"core"},
    "optim": {"core"},
    "losses": {"core", "ops"},
    "advantages": {"core", "ops"},
    "data": {"core"},
    "environments": {"core"},
    "rewards": {"core"},
    "records": {"core"},
    "checkpoint": {"core"},
    "algorithm": {"core", "ops", "optim"},
}

TORCH = {"torch"}
# Libraries beside Python's own, by unit; a longer path says what one file may use on top.
LIBRARIES = {
    "rlmodule/core": TORCH | {"numpy"},
    "rlmodule/core/config.py": {"omegaconf"},
    "rlmodule/core/hub.py": {"huggingface_hub"},
    "rlmodule/core/sandbox": {"rlmodule_sandbox"},  # itself, as children call it
    "rlmodule/ops": TORCH,
    "rlmodule/losses": TORCH,
    "rlmodule/advantages": TORCH,
    "rlmodule/batching": TORCH | {"numpy"},
    "rlmodule/optim": TORCH,
    "rlmodule/optim/parts/eight_bit.py": {"bitsandbytes"},
    "rlmodule/models": TORCH | {"transformers"},
    "rlmodule/models/byte_tokenizer.py": {"tokenizers"},
    "rlmodule/models/lora.py": {"peft", "safetensors"},
    "rlmodule/models/served.py": {"safetensors"},
    "rlmodule/models/weights.py": {"safetensors"},
    "rlmodule/models/places.py": {"safetensors"},
    "rlmodule/models/value.py": {"safetensors"},
    "rlmodule/data": TORCH | {"transformers", "numpy"},
    "rlmodule/data/chat.py": {"jinja2"},
    "rlmodule/data/arrow.py": {"pyarrow"},
    "rlmodule/data/readers/arrow_file.py": {"pyarrow"},
    "rlmodule/data/readers/hub.py": {"datasets", "huggingface_hub"},
    "rlmodule/data/readers/parquet.py": {"pyarrow"},
    "rlmodule/data/readers/row_groups.py": {"pyarrow"},
    "rlmodule/rewards": TORCH | {"transformers"},
    "rlmodule/rewards/parts/math_grader.py": {"math_verify"},  # these run in child processes, without this package
    "rlmodule/rewards/parts/gym_scorer.py": {"reasoning_gym"},
    "rlmodule/rewards/parts/code_runner.py": {"rlmodule_sandbox"},  # core/sandbox, as children call it
    "rlmodule/environments/parts/tools.py": {"transformers"},
    "rlmodule/environments/parts/python_program.py": {"rlmodule_sandbox"},  # core/sandbox, as children call it
    "rlmodule/environments/openenv.py": {"websockets"},
    "rlmodule/environments/reasoning_gym.py": {"reasoning_gym"},
    "rlmodule/environments/verifiers.py": {"verifiers"},
    "rlmodule/rollout": TORCH | {"transformers", "numpy"},
    "rlmodule/checkpoint": TORCH,
    "rlmodule/algorithm": TORCH,
    "rlmodule/training": TORCH,
    "rlmodule/experience": TORCH | {"numpy"},
    "rlmodule/evaluation": {"numpy"},
    "rlmodule/module.py": TORCH | {"lightning"},
    "rlmodule/datamodule.py": TORCH | {"lightning"},
    "rlmodule/loggers": TORCH | {"lightning"},
    "rlmodule/loggers/mlflow.py": {"mlflow"},
    "rlmodule/loggers/wandb.py": {"wandb"},
    "rlmodule/callbacks": TORCH | {"lightning", "transformers"},
    "rlmodule/callbacks/progress.py": {"rich"},
    "rlmodule/callbacks/report.py": {"rich", "matplotlib"},
    "rlmodule/run": TORCH | {"transformers", "omegaconf"},
    "rlmodule/run/preflight/tokens.py": {"numpy"},
    "rlmodule/run/launchers/ray.py": {"ray"},
    "rlmodule/run/run.py": {"lightning"},
    "rlmodule/run/evaluation_run.py": {"lightning"},
    "rlmodule/run/sharing_cost.py": {"lightning"},
    "rlmodule/run/planning/page.py": {"rich"},
    "rlmodule/run/build": {"lightning"},
    "rlmodule/parity": TORCH | {"lightning"},
    "rlmodule/parity/report.py": {"rich"},
    "rlmodule/commands": TORCH | {"transformers"},
    "rlmodule/commands/parts/comparison.py": {"omegaconf"},
    "rlmodule/commands/parts/comparison_chart.py": {"matplotlib"},
    "rlmodule/commands/parts/comparison_tables.py": {"rich"},
    "rlmodule/commands/parts/hub.py": {"huggingface_hub"},
    "rlmodule/run/saved/model_card.py": {"omegaconf"},
    "rlmodule/run/saved/saved_settings.py": {"omegaconf"},
    "rlmodule/commands/parts/sweep.py": {"rich"},
    "rlmodule/commands/evaluate.py": {"rich"},
    "rlmodule/commands/plan.py": {"rich"},
    "rlmodule/commands/strategies.py": {"rich"},
    "rlmodule/cli.py": {"hydra", "omegaconf"},
    "strategies": TORCH | {"lightning"},
    "strategies/deepspeed.py": {"deepspeed"},
    "strategies/veomni.py": {"transformers"},
    "strategies/parts/automodel_wrapping.py": {"nemo_automodel"},
    "strategies/parts/experts.py": {"transformers"},
    "strategies/parts/foreign_imports.py": {"transformers"},
    "strategies/parts/megatron_api.py": {"megatron"},
    "strategies/parts/megatron_trunk.py": {"transformers"},
    "strategies/parts/requirements.py": {"packaging"},
    "strategies/parts/tensor_parallel.py": {"transformers"},
    "strategies/parts/torchtitan_blocks.py": {"torchtitan", "transformers"},
    "strategies/parts/veomni_wrapping.py": {"veomni"},
    "strategies/parts/shards.py": {"safetensors"},
    "strategies/parts/snapshot.py": {"safetensors"},
}

# Imports inside a function: a chosen component's optional dependency, and these, each for the reason beside it.
DEFERRED = {
    ("rlmodule/cli.py", "rlmodule.commands"),  # --help and tab completion must not wait for torch
    ("rlmodule/cli.py", "rlmodule.run.config"),  # likewise
    ("rlmodule/cli.py", "rlmodule.run.run"),  # likewise
    ("rlmodule/cli.py", "rlmodule.run.warm_start"),  # likewise
    ("rlmodule/cli.py", "strategies.registry"),  # likewise
    ("strategies/deepspeed.py", ""),  # the device must be named before it is imported
    ("rlmodule/optim/parts/eight_bit.py", "bitsandbytes"),  # bitsandbytes, optional: for those who choose adamw8bit
    ("rlmodule/data/readers/hub.py", ""),  # datasets, optional: for those who name data sets of the hub
    ("rlmodule/environments/openenv.py", "websockets.sync.client"),  # optional: for those who have such a server
    ("rlmodule/environments/reasoning_gym.py", ""),  # optional: for those who choose it
    ("rlmodule/environments/verifiers.py", ""),  # likewise
    ("rlmodule/environments/verifiers.py", "verifiers.clients"),  # likewise
    ("rlmodule/environments/verifiers.py", "verifiers.errors"),  # likewise
    ("rlmodule/environments/verifiers.py", "verifiers.types"),  # likewise
    ("rlmodule/loggers/mlflow.py", ""),  # optional: for those who log there
    ("rlmodule/loggers/wandb.py", ""),  # likewise
    ("rlmodule/run/launchers/ray.py", ""),  # optional: for those who have a Ray cluster
    ("rlmodule/run/launchers/ray.py", "ray.util.scheduling_strategies"),  # likewise
    ("rlmodule/models/lora.py", ""),  # peft, optional: for those who train adapters
}

# Folders whose files are the menu: file name = config name = registry name.
MENUS = {
    "losses": "LOSSES",
    "advantages": "ADVANTAGES",
    "rewards": "REWARDS",
    "environments": "ENVIRONMENTS",
    "rollout": "ROLLOUTS",
    "loggers": "LOGGERS",
    "callbacks": "CALLBACKS",
    "commands": "COMMANDS",
    "run/launchers": "LAUNCHERS",
    "optim": "OPTIMIZERS",
}

# Strategies that leave the cutting of models to another project, and everything else to a strategy of this one.
BUILT_ON = {name: {"fsdp2"} for name in ("automodel", "torchtitan", "veomni")}

VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}


@dataclass(frozen=True)
class Import:
    """One imported module. ``deferred``: inside a function; ``for_types``: under ``if TYPE_CHECKING``."""

    name: str
    line: int
    deferred: bool
    for_types: bool


def sources(*places: str) -> list[Path]:
    """Python files of folders and files, in order."""
    below = {path for place in places for path in (ROOT / place).rglob("*.py")}
    return sorted(below | {ROOT / place for place in places if place.endswith(".py")})


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> list[Import]:
    """Every import of a file. A relative one fails: all are written in full."""
    found: list[Import] = []

    def walk(node: ast.AST, deferred: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, deferred, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno}: write the import in full"
            module = str(node.module)
            # `from package import module` names the module, so that it finds its layer.
            found.extend(Import(f"{module}.{alias.name}", node.lineno, deferred, for_types) for alias in node.names)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = for_types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            walk(child, inside, typing)

    walk(ast.parse(path.read_text(encoding="utf-8")), deferred=False, for_types=False)
    return found


def unit_of(module: str) -> str:
    """``rlmodule.core.types.Sample`` -> ``core``; the package itself, which holds the version, is ``""``."""
    name = (module + ".").split(".")[1]
    return name if any(name in layer for layer in LAYERS) else ""


def own_unit(path: Path) -> str:
    first = path.relative_to(ROOT / "rlmodule").parts[0]
    return first.removesuffix(".py")


def layer_of(unit: str) -> int:
    places = [i for i, layer in enumerate(LAYERS) if unit in layer]
    assert len(places) == 1, f"rlmodule/{unit} stands in {len(places)} layers of the table; give it exactly one"
    return places[0]


def test_every_unit_has_one_layer_and_every_layer_lists_what_exists():
    there = {own_unit(path) for path in sources("rlmodule")} - {"__init__"}
    listed = {unit for layer in LAYERS for unit in layer}
    assert there == listed
    for unit in there:
        layer_of(unit)


@pytest.mark.parametrize("path", sources("rlmodule"), ids=shown)
def test_left_does_not_import_right(path):
    unit = own_unit(path)
    for found in imports_of(path):
        top = found.name.split(".")[0]
        is_closed = {"train"} if unit == "cli" else {"train", "strategies"}  # the command line joins the two packages
        assert top not in is_closed, f"{shown(path)}:{found.line}: {unit} never imports {top}"
        if top != "rlmodule" or unit == "__init__":
            continue
        other = unit_of(found.name)
        if other in ("", unit):
            continue
        # Types alone may point to the right: nothing is loaded, and a protocol has to name what it is about.
        if found.for_types:
            continue
        assert layer_of(other) < layer_of(unit), f"{shown(path)}:{found.line}: {unit} may not import {other}"
        allowed = ONLY.get(unit, {other})
        assert other in allowed, f"{shown(path)}:{found.line}: {unit} sees {sorted(allowed)} only, not {other}"


@pytest.mark.parametrize("path", sources("strategies"), ids=shown)
def test_strategies_see_the_core_and_their_parts_alone(path):
    own = path.relative_to(ROOT / "strategies").with_suffix("").parts
    for found in imports_of(path):
        parts = found.name.split(".")
        if parts[0] == "rlmodule":
            assert parts[1] == "core", f"{shown(path)}:{found.line}: a strategy implements rlmodule.core.contract"
        if parts[0] == "strategies":
            allowed = {"parts"} if own[0] in ("parts", "registry") else {"parts", "registry", *BUILT_ON.get(own[0], ())}
            assert parts[1] in allowed, f"{shown(path)}:{found.line}: {own[0]} may not import {parts[1]}"
        assert parts[0] != "train", f"{shown(path)}:{found.line}: nobody imports train.py"


@pytest.mark.parametrize("path", sources("rlmodule", "strategies", "train.py"), ids=shown)
def test_libraries_stay_where_they_belong(path):
    allowed = {
        name
        for place, names in LIBRARIES.items()
        if shown(path) == place or shown(path).startswith(place + "/")
        for name in names
    }
    for found in imports_of(path):
        top = found.name.split(".")[0]
        if top in sys.stdlib_module_names or top in ("rlmodule", "strategies"):
            continue
        assert top in allowed, f"{shown(path)}:{found.line}: {top} is not for this file"


def test_every_entry_of_the_library_table_is_used():
    for place, names in LIBRARIES.items():
        used = {found.name.split(".")[0] for path in sources(place) for found in imports_of(path)}
        shared = {"numpy", "torch", "transformers"}  # granted to a layer, needed by none of its files in particular
        assert names <= used | shared, f"{place}: {names - used - shared} is allowed and not used"


def test_no_import_hides_in_a_function():
    hidden = {
        (shown(path), ".".join(found.name.split(".")[:-1]))
        for path in sources("rlmodule", "strategies", "train.py")
        for found in imports_of(path)
        if found.deferred
    }
    assert hidden == DEFERRED


def test_opening_a_package_imports_nothing_heavy():
    """``import rlmodule.losses`` reads a menu; it must not bring torch and its friends along on its own account."""
    for path in (p for p in sources("rlmodule", "strategies") if p.name == "__init__.py"):
        for found in imports_of(path):
            top = found.name.split(".")[0]
            light = top in sys.stdlib_module_names or top in ("rlmodule", "strategies")
            assert light or found.for_types, f"{shown(path)}:{found.line}: {top} in an __init__.py"


@pytest.mark.parametrize(("folder", "registry"), MENUS.items(), ids=list(MENUS))
def test_a_menu_folder_holds_components_only(folder, registry):
    """One registered class per file; what they share is in ``parts/``."""
    package = ROOT / "rlmodule" / folder
    assert {p.name for p in package.iterdir() if p.is_dir()} <= {"parts", "__pycache__"}
    for path in package.glob("*.py"):
        if path.name == "__init__.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        registered = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and any(ast.unparse(decorator) == f"{registry}.register" for decorator in node.decorator_list)
        ]
        assert len(registered) == 1, f"{shown(path)} registers {registered}"


def test_a_strategy_file_registers_strategies_and_the_rest_is_parts():
    for path in (ROOT / "strategies").glob("*.py"):
        if path.stem in ("__init__", "registry"):
            continue
        classes = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
        assert any("STRATEGIES.register" in ast.unparse(d) for c in classes for d in c.decorator_list), shown(path)


def test_names_say_what_is_inside():
    for path in sources("rlmodule", "strategies", "benchmarks", "tests"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[:2] == ("tests", "helpers"):
            continue
        assert not VAGUE & set(parts), f"{shown(path)} says nothing"


# Words of our own for things that the field has a name for; they stay out of identifiers.
GONE = {
    *("examination", "verdict", "dear", "dearer", "dearest", "supply", "supplies", "stopwatch", "journal", "tally"),
    *("somebody", "nobody", "whoever", "skeleton", "strangers", "outline", "session", "charge", "price"),
    *("informative", "filler", "judge", "judged", "itself"),
}


def words_of(identifier: str) -> set[str]:
    """``LastStep_count`` -> last, step, count."""
    return {word.lower() for word in re.split(r"_+|(?<=[a-z])(?=[A-Z])", identifier) if word}


@pytest.mark.parametrize("path", sources("rlmodule", "strategies"), ids=shown)
def test_names_are_the_field_s_words(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = {
            ast.Name: lambda n: n.id,
            ast.arg: lambda n: n.arg,
            ast.Attribute: lambda n: n.attr,
            ast.FunctionDef: lambda n: n.name,
            ast.ClassDef: lambda n: n.name,
        }
        if type(node) in names:
            name = names[type(node)](node)
            gone = GONE & words_of(name)
            assert not gone, f"{shown(path)}:{node.lineno}: {name}: the field has another word for {sorted(gone)[0]}"


def test_every_file_says_what_it_is_for():
    for path in sources("rlmodule", "strategies", "benchmarks", "train.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), (
            f"{shown(path)} does not say what it is for"
        )


def test_every_test_file_mirrors_a_file():
    """``tests/a/test_b.py`` is about ``rlmodule/a/b.py`` or a part of it; whole runs stand apart."""
    for path in sources("tests"):
        parts = path.relative_to(ROOT / "tests").parts
        if len(parts) == 1 or parts[0] in ("helpers", "end_to_end", "strategies", "benchmarks", "cli"):
            continue
        folder = ROOT.joinpath("rlmodule", *parts[:-1])
        assert folder.is_dir(), f"{shown(path)} mirrors nothing"
