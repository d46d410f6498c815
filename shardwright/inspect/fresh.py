"""Imports modules that users edit again, without the state that earlier traces left in them."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

from shardlib.tracing import tracing
from shardwright.optimizers.rates import own_functions
from shardwright.program.source import PACKAGES, own_modules
from shardwright.program.spec import load_spec
from shardwright.program.step import Step

MODELS = "shardwright.models"
ONCE = (*PACKAGES, "jax", "jaxlib")
"""Packages that hold the trace, wherever they are installed."""


@contextlib.contextmanager
def reimport(step: Step) -> Iterator[Step]:
    """Context that yields a step of freshly imported modules of its model and of train.py, as when
    a program starts.

    A trace leaves state in a module: a functools.cache, a dict, an attribute of a class. Another
    trace in the same process would read from it values that hold on the mesh of the first one.

    Other modules of their packages are imported again too. Objects that no file defines stay as
    they are. Trace the step within the context.
    """
    c = step.config.model
    kinds = (type(step.model), type(step.config.model))
    files = {str(path) for path in own_modules()}
    own_parts = own_functions(step.config.optimizer)
    names = step.spec.module, *(part.__module__ for part in (*kinds, *own_parts))
    packages = {name.partition(".")[0] for name in names} - {"__main__", *ONCE}

    def is_own(name: str, module: object) -> bool:
        top = name.partition(".")[0]
        is_named = top in packages or (
            getattr(module, "__file__", None) in files and top not in ONCE
        )
        is_named |= name == step.spec.module or f"{name}.".startswith(f"{MODELS}.")
        return is_named and name != "__main__" and getattr(module, "__spec__", None) is not None

    def find_own() -> dict[str, ModuleType]:
        return {name: module for name, module in [*sys.modules.items()] if is_own(name, module)}

    before = find_own()
    _forget(before)

    def reload(kind: type) -> type:
        if kind.__module__ not in before or "<locals>" in kind.__qualname__:
            return kind
        return functools.reduce(
            getattr, kind.__qualname__.split("."), importlib.import_module(kind.__module__)
        )

    try:
        spec = load_spec(step.spec.module) if step.spec.module in before else step.spec
        Model, Settings = map(reload, kinds)
        settings = Settings(**{f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.init})
        c = dataclasses.replace(copy.deepcopy(step.config), model=settings)
        with tracing(step.mesh):  # the model may read the mesh too
            model = Model(settings)
        yield dataclasses.replace(step, config=c, model=model, spec=spec, _known={})
    finally:
        _forget(find_own())
        sys.modules.update(before)
        for name, module in before.items():
            package, _, last = name.rpartition(".")
            if package in sys.modules and last not in vars(sys.modules[package]):
                setattr(sys.modules[package], last, module)


def _forget(modules: Iterable[str]) -> None:
    """Has Python import these modules again; `from package import module` reads the attribute of
    the package.
    """
    for name in modules:
        package, _, last = name.rpartition(".")
        # Not an object of the module's name that the package imported from it.
        if package in sys.modules and vars(sys.modules[package]).get(last) is sys.modules[name]:
            delattr(sys.modules[package], last)
        del sys.modules[name]
