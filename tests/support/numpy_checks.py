"""Checks the jaxtyping annotations of host-side NumPy code while tests run, dims agreeing within
each call.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Self

import jaxtyping
import typeguard

from shardlib.shardtypes import ArrayType


def check_modules(*modules: ModuleType) -> None:
    """From now on, all functions and methods of `modules` check what they are given and what they
    return.

    Of a package, those of all its modules that are imported by now. jaxtyping's import hook would
    do so only for modules that no other test has imported before.
    """
    begins = tuple(f"{module.__name__}." for module in modules)
    loaded = [module for name, module in sys.modules.items() if f"{name}.".startswith(begins)]
    checked: dict[Callable, Callable] = {}
    for module in loaded:
        classes = [c for c in vars(module).values() if inspect.isclass(c)]
        for holder in (module, *(c for c in classes if c.__module__ == module.__name__)):
            for name, of in list(vars(holder).items()):
                if inspect.isfunction(of) and of.__code__.co_filename == module.__file__:
                    checked[of] = jaxtyping.jaxtyped(of, typechecker=_check_annotations)
                    setattr(holder, name, checked[of])
    for module in loaded:  # what one has imported from another by name
        for name, of in list(vars(module).items()):
            if inspect.isfunction(of):
                setattr(module, name, checked.get(of, of))


def _check_annotations(function: Callable) -> Callable:
    """typeguard's own decorator cannot be used: it reads annotations from the source, where dims
    look like Python.
    """
    signature = inspect.signature(function)

    def check(value: object, annotation: object) -> None:
        # shardlib checks its own types.
        if annotation in (inspect.Signature.empty, Self) or isinstance(annotation, ArrayType):
            return
        every = typeguard.CollectionCheckStrategy.ALL_ITEMS
        typeguard.check_type(value, annotation, collection_check_strategy=every)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is not parameter.VAR_POSITIONAL:
                check(value, parameter.annotation)
        result = function(*args, **kwargs)
        check(result, signature.return_annotation)
        return result

    return wrapper
