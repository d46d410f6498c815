"""What pyproject.toml and constraints/ declare is what the source needs."""

import ast
import functools
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = sorted((ROOT / "constraints").glob("py*.txt"))
INSTALLED_EXTRAS = ("tools", "test", "oracle", "docs")
PACKAGES = ("shardlib", "shardwright")


def requirements(*extras: str) -> list[Requirement]:
    optional = PROJECT["project"]["optional-dependencies"]
    specs = [
        *PROJECT["project"]["dependencies"],
        *(spec for extra in extras for spec in optional[extra]),
    ]
    return [Requirement(spec) for spec in specs]


def names(*extras: str) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements(*extras)}


def imports(tree: ast.AST, *, in_functions: bool) -> set[str]:
    """The first part of each absolutely imported module's name; `in_functions` adds imports that
    wait for a call.
    """
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= imports(node, in_functions=in_functions)
    return found


# a second a call
distributions_of_modules = functools.cache(importlib.metadata.packages_distributions)


def third_party(tree: ast.AST, *, in_functions: bool) -> set[str]:
    """The distributions that a source file imports, the project's own modules and the standard
    library left out.
    """
    modules = (
        imports(tree, in_functions=in_functions) - {"train", *PACKAGES} - sys.stdlib_module_names
    )
    distributions = distributions_of_modules()
    return {canonicalize_name(distributions.get(module, [module])[0]) for module in modules}


def sources() -> list[Path]:
    found = [
        *ROOT.glob("*.py"),
        *(path for name in PACKAGES for path in ROOT.glob(f"{name}/**/*.py")),
    ]
    return sorted(path for path in found if not path.is_symlink() and "template" not in path.parts)


def test_imports_are_declared():
    """What is imported with a module is a dependency, what is imported in a function is in some
    extra.
    """
    of_tools, of_all, of_extras = (
        names("tools"),
        names(),
        names(*PROJECT["project"]["optional-dependencies"]),
    )
    for path in sources():
        declared = of_tools if path.is_relative_to(ROOT / "shardwright/tools") else of_all
        of_pytest = {"pytest"} if path.name == "pytest_plugin.py" else set()  # which pytest imports
        tree = ast.parse(path.read_text())
        assert third_party(tree, in_functions=False) <= declared | of_pytest, path
        assert third_party(tree, in_functions=True) <= of_extras, path


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines)
    }


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_what_is_declared(path):
    """A pin for every declared package, inside the declared range, that any index can serve (no
    local version).
    """
    version = path.stem.removeprefix("py")
    pinned = pins(path)
    for requirement in requirements(*INSTALLED_EXTRAS):
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate(
            {"python_version": version}
        )
        assert (name in pinned) == applies, f"{name} on Python {version}"
        assert not applies or pinned[name] in requirement.specifier, (
            f"{name}=={pinned[name]} is not {requirement}"
        )
    assert all(Version(version).local is None for version in pinned.values())
