"""The house plan as tests: imports point one way, and start-up stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pytest_modelhealth"

# From the bottom up. A module imports its own layer and the layers below it.
LAYERS = (
    {"errors", "settings"},
    {"statistics"},
    {"report"},
    {"layers"},
    {"capture", "checks"},
    {"alignment"},
    {"tolerance"},
    {"comparison", "snapshot"},
    {"inspector"},
    {"rendering"},
    {"plugin"},
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
STRANGERS = {("capture", "checks"), ("checks", "capture")}

# Where a library may be imported: the others reach it through these, or not at all.
HOMES = {
    "pytest": ("plugin",),
    "_pytest": ("plugin",),
    "syrupy": ("plugin", "snapshot"),
    "matplotlib": (
        "rendering.figure",
        "rendering.histogram",
        "rendering.flow",
        "rendering.gradient_flow",
        "rendering.error_depth",
    ),
}
HEAVY = ("torch", "numpy", "matplotlib")
DECLARES_CHECKS = ("errors", "settings", "checks")
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}


@dataclass(frozen=True)
class Import:
    """One imported module, as one module of the package names it.

    Modules of the package are named without the package (`statistics.merge`, and `""` for the
    package's own `__init__`); all others have `target` None and `library` set.
    """

    importer: str
    target: str | None
    library: str | None
    when: str
    where: str

    def __str__(self) -> str:
        own = f"{PACKAGE.name}.{self.target}".rstrip(".")
        imported = own if self.library is None else self.library
        return f"{self.where}: {self.importer or '__init__'} imports {imported}"


class Package:
    """A package's modules by name, and every import in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
        self.imports = [found for name in self.modules for found in self._imports_of(name)]

    def _imports_of(self, name: str) -> Iterator[Import]:
        path = self.modules[name]
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node, when in import_nodes(tree, "import"):
            where = f"{path.relative_to(self.root.parent)}:{node.lineno}"
            for dotted in dict.fromkeys(self._targets(node, name)):
                own, _, inner = dotted.partition(".")
                if own == self.root.name:
                    yield Import(name, inner, None, when, where)
                else:
                    yield Import(name, None, dotted, when, where)

    def _targets(self, node: ast.AST, importer: str) -> Iterator[str]:
        """The full dotted names of the modules that one import statement names."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self._base(node, importer)
            # The version is a literal in the package's __init__, and stands on no layer.
            names = [alias.name for alias in node.names if alias.name != "__version__"]
            yield from (self._module_of(f"{base}.{name}", otherwise=base) for name in names)
        elif isinstance(node, ast.Call):
            yield node.args[0].value

    def _base(self, node: ast.ImportFrom, importer: str) -> str:
        """What stands between `from` and `import`, with leading dots resolved."""
        if not node.level:
            return node.module
        parts = [self.root.name, *importer.split(".")] if importer else [self.root.name]
        is_package = self.modules[importer].name == "__init__.py"
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, node.module] if node.module else parts)

    def _module_of(self, dotted: str, otherwise: str) -> str:
        inner = dotted.removeprefix(f"{self.root.name}.")
        return dotted if inner != dotted and inner in self.modules else otherwise


def module_name(path: Path, root: Path) -> str:
    """A module's dotted name without the package; a folder's `__init__` has the folder's name."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_nodes(node: ast.AST, when: str) -> Iterator[tuple[ast.AST, str]]:
    """Every import below a node, with when it happens: `import`, `call` or `type checking`."""
    if isinstance(node, ast.Import | ast.ImportFrom) or is_import_call(node):
        yield node, when
    elif isinstance(node, ast.If) and is_type_checking(node.test):
        for child in node.body:
            yield from import_nodes(child, "type checking")
        for child in node.orelse:
            yield from import_nodes(child, when)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        when = "call" if when == "import" else when
    for child in ast.iter_child_nodes(node):
        yield from import_nodes(child, when)


def is_type_checking(test: ast.expr) -> bool:
    """Whether the condition of an `if` is the one that only a type checker sees as true."""
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def is_import_call(node: ast.AST) -> bool:
    """Whether a node is `import_module("...")`, which would otherwise be a way around the plan."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"import_module", "importlib.import_module", "__import__"}
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    )


def part_of(module: str) -> str:
    """The file or folder directly in the package that a module belongs to."""
    return module.partition(".")[0]


def is_at_home(module: str, homes: tuple[str, ...]) -> bool:
    """Whether a module is one of the homes or lies inside one."""
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def misplaced_modules(package: Package) -> list[str]:
    """Modules that no layer names, and layers that no module fills."""
    parts = {part_of(module) for module in package.modules} - {""}
    return [f"{part} has no layer: name it in LAYERS" for part in sorted(parts - set(RANKS))] + [
        f"{part} is in LAYERS but not in the package" for part in sorted(set(RANKS) - parts)
    ]


def upward_imports(package: Package) -> list[str]:
    """Imports of a layer above the importer's own, and between `capture` and `checks`."""
    problems = []
    for found in package.imports:
        importer, target = part_of(found.importer), part_of(found.target or "")
        if importer not in RANKS or target not in RANKS:
            continue
        if RANKS[target] > RANKS[importer]:
            problems.append(f"{found}, which is a layer above it")
        elif (importer, target) in STRANGERS:
            problems.append(f"{found}, and these two never import each other")
    return problems


def imports_of_the_root(package: Package) -> list[str]:
    """Imports of public names from the package's `__init__`, which stands on every layer."""
    return [
        f"{found} itself: import from the module that defines the name"
        for found in package.imports
        if found.target == "" and found.importer
    ]


def libraries_away_from_home(package: Package) -> list[str]:
    """Imports of pytest, syrupy and matplotlib outside the modules that wrap them."""
    problems = []
    for found in package.imports:
        homes = HOMES.get(part_of(found.library or ""))
        if homes and found.when != "type checking" and not is_at_home(found.importer, homes):
            problems.append(f"{found}, which only {' and '.join(homes)} may")
    return problems


def import_cycles(package: Package) -> list[str]:
    """Circles of imports that happen while the modules are being imported."""
    edges: dict[str, dict[str, Import]] = {name: {} for name in package.modules}
    for found in package.imports:
        if found.when == "import" and found.target in edges and found.target != found.importer:
            edges[found.importer].setdefault(found.target, found)
    for start in edges:
        cycle = path_back(edges, start)
        if cycle:
            return ["\n    ".join(["these import each other:", *map(str, cycle)])]
    return []


def path_back(edges: dict[str, dict[str, Import]], start: str) -> list[Import] | None:
    """The imports that lead from a module back to itself, or None."""
    reached: dict[str, list[Import]] = {start: []}
    queue = [start]
    for module in queue:
        for target, found in edges[module].items():
            path = [*reached[module], found]
            if target == start:
                return path
            if target not in reached:
                reached[target] = path
                queue.append(target)
    return None


def heavy_imports_of_checks(package: Package) -> list[str]:
    """Imports on the shelf of checks beyond what declares one: ``pytest --help`` loads them all."""
    shelf = {path.stem for path in (package.root / "checks").glob("*.py")}
    return [
        f"{found}, which pytest --help would load: import it for types alone, or in a function"
        for found in package.imports
        if part_of(found.importer) == "checks" and found.when == "import"
        if found.importer.partition(".")[2] in {*shelf, ""}
        if part_of(found.library or "") in HEAVY
        or (found.target is not None and not is_declaring(found.target, shelf))
    ]


def is_declaring(target: str, shelf: set[str]) -> bool:
    """Whether a module is light: below the checks, or a file of their shelf."""
    part, _, inner = target.partition(".")
    return part in DECLARES_CHECKS and (part != "checks" or inner in {*shelf, ""})


def vague_names(package: Package) -> list[str]:
    """Modules named after no subject, which collect whatever has no other place."""
    return [
        f"{path.relative_to(package.root.parent)}: name it after what it holds"
        for module, path in package.modules.items()
        if VAGUE_NAMES & {part.strip("_") for part in module.split(".")}
    ]


RULES = (
    misplaced_modules,
    upward_imports,
    imports_of_the_root,
    libraries_away_from_home,
    import_cycles,
    heavy_imports_of_checks,
    vague_names,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_house_plan(rule: Callable[[Package], list[str]]) -> None:
    """The package breaks none of the rules on what may import what."""
    problems = rule(Package(PACKAGE))
    assert not problems, "\n" + "\n".join(problems)


PLANTED = [
    pytest.param(
        upward_imports,
        {"statistics/merge.py": "import math\nfrom pytest_modelhealth.report import HealthReport"},
        "statistics/merge.py:2: statistics.merge imports pytest_modelhealth.report",
        id="upward",
    ),
    pytest.param(
        upward_imports,
        {"settings.py": "def load():\n    from .inspector import Inspector"},
        "settings.py:2: settings imports pytest_modelhealth.inspector",
        id="upward-in-a-function",
    ),
    pytest.param(
        upward_imports,
        {"report.py": "if TYPE_CHECKING:\n    from .checks.check import Check"},
        "report.py:2: report imports pytest_modelhealth.checks.check",
        id="upward-for-types",
    ),
    pytest.param(
        upward_imports,
        {"layers.py": "import_module('pytest_modelhealth.plugin')"},
        "layers.py:1: layers imports pytest_modelhealth.plugin",
        id="upward-by-import_module",
    ),
    pytest.param(
        upward_imports,
        {"capture/engine.py": "from .. import checks"},
        "capture/engine.py:1: capture.engine imports pytest_modelhealth.checks",
        id="capture-to-checks",
    ),
    pytest.param(
        imports_of_the_root,
        {"inspector.py": "from pytest_modelhealth import Inspector"},
        "inspector.py:1: inspector imports pytest_modelhealth itself",
        id="root",
    ),
    pytest.param(
        libraries_away_from_home,
        {"snapshot.py": "import syrupy.types\nimport pytest"},
        "snapshot.py:2: snapshot imports pytest",
        id="pytest-outside-plugin",
    ),
    pytest.param(
        libraries_away_from_home,
        {"rendering/html.py": "def render():\n    from matplotlib.figure import Figure"},
        "rendering/html.py:2: rendering.html imports matplotlib.figure",
        id="matplotlib-outside-histogram",
    ),
    pytest.param(
        import_cycles,
        {"errors.py": "from . import settings", "settings.py": "from .errors import suggest"},
        "errors.py:1: errors imports pytest_modelhealth.settings",
        id="cycle",
    ),
    pytest.param(
        heavy_imports_of_checks,
        {"checks/finite.py": "from pytest_modelhealth.report import Violation"},
        "checks/finite.py:1: checks.finite imports pytest_modelhealth.report",
        id="check-loads-the-report",
    ),
    pytest.param(
        heavy_imports_of_checks,
        {"checks/finite.py": "import numpy.linalg"},
        "checks/finite.py:1: checks.finite imports numpy.linalg",
        id="check-loads-numpy",
    ),
    pytest.param(
        heavy_imports_of_checks,
        {"checks/__init__.py": "from .judging import judge", "checks/judging/__init__.py": ""},
        "checks/__init__.py:1: checks imports pytest_modelhealth.checks.judging",
        id="shelf-loads-what-judges",
    ),
    pytest.param(misplaced_modules, {"extras.py": ""}, "extras has no layer", id="no-layer"),
    pytest.param(vague_names, {"checks/_utils.py": ""}, "checks/_utils.py", id="vague"),
]


@pytest.mark.parametrize(("rule", "files", "expected"), PLANTED)
def test_a_planted_fault_is_named_with_file_and_line(
    rule: Callable[[Package], list[str]], files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """Each rule finds the fault it exists for, and says where it is."""
    problems = rule(planted_package(tmp_path, files))
    assert any(expected in problem for problem in problems), problems


ALLOWED = [
    pytest.param(
        {"plugin/options.py": "import pytest\nfrom ..checks.check import Check"}, id="down"
    ),
    pytest.param({"rendering/histogram.py": "import matplotlib.figure"}, id="matplotlib-at-home"),
    pytest.param({"__init__.py": "from .plugin import options"}, id="root-imports-anything"),
    pytest.param({"report.py": "if TYPE_CHECKING:\n    import matplotlib.figure"}, id="for-types"),
    pytest.param({"report.py": "from pytest_modelhealth import __version__"}, id="version"),
    pytest.param(
        {
            "checks/finite.py": "if TYPE_CHECKING:\n    from ..report import Violation\n"
            "def violation():\n    from ..report import Violation",
            "checks/judging/__init__.py": "from ...report import Judgement",
        },
        id="check-declares-light",
    ),
    pytest.param(
        {
            "checks/__init__.py": "from .check import Check",
            "checks/finite.py": "from . import check",
        },
        id="shelf-with-a-front",
    ),
    pytest.param(
        {
            "errors.py": "from .settings import Settings",
            "settings.py": "def f():\n    from .errors import SettingsError",
        },
        id="back-in-a-function",
    ),
]


@pytest.mark.parametrize("files", ALLOWED)
def test_what_the_house_plan_allows_is_not_reported(files: dict[str, str], tmp_path: Path) -> None:
    """No rule objects to an import that points down or stays in its layer."""
    package = planted_package(tmp_path, files)
    assert [problem for rule in RULES for problem in rule(package)] == []


def planted_package(parent: Path, files: dict[str, str]) -> Package:
    """A package with an empty module for each name in LAYERS, and the given files over them."""
    root = parent / PACKAGE.name
    empty = dict.fromkeys(f"{part}/__init__.py" for part in RANKS if f"{part}.py" not in files)
    shelf_files = {"checks/check.py": "", "__init__.py": ""}
    for name, text in {**empty, **shelf_files, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or "", encoding="utf-8")
    return Package(root)


def run_python(*arguments: str) -> str:
    """What a fresh interpreter prints, run where the package is importable."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loading_the_plugin_imports_no_heavy_library() -> None:
    """A pytest run that asks for no inspector loads neither torch, numpy nor matplotlib."""
    code = "import sys, pytest_modelhealth, pytest_modelhealth.plugin; print(*sys.modules)"
    loaded = run_python("-c", code).split()
    assert "pytest_modelhealth.plugin" in loaded
    assert [library for library in HEAVY if library in loaded] == []


def test_every_module_imports_without_a_warning() -> None:
    """A fresh interpreter under `-W error` imports every module of the package."""
    names = [f"{PACKAGE.name}.{module}".rstrip(".") for module in Package(PACKAGE).modules]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    run_python("-W", "error", "-c", code, *names)
