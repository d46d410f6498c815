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

_checked: dict[Callable, Callable] = {}


def check_modules(*modules: ModuleType) -> None:
    """From now on, all functions and methods of `modules` check what they are given and what they
    return.

    Of a package, those of all its modules that are imported by now.

    jaxtyping's import hook would do so only for modules that no other test has imported before.
    """
    loaded = [
        m
        for module in modules
        for name, m in sys.modules.items()
        if f"{name}.".startswith(f"{module.__name__}.")
    ]
    for module in loaded:
        for holder in [
            module,
            *(
                c
                for c in vars(module).values()
                if inspect.isclass(c) and c.__module__ == module.__name__
            ),
        ]:
            for name, function in list(vars(holder).items()):
                if (
                    inspect.isfunction(function)
                    and function.__code__.co_filename == module.__file__
                ):
                    _checked[function] = jaxtyping.jaxtyped(
                        function, typechecker=_check_annotations
                    )
                    setattr(holder, name, _checked[function])
    # What one module has imported from another by name.
    for module in loaded:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in _checked:
                setattr(module, name, _checked[value])


def _check_annotations(function: Callable) -> Callable:
    """typeguard's own decorator cannot be used: it reads annotations from the source, where dims
    look like Python.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is not parameter.VAR_POSITIONAL:
                _check(value, parameter.annotation)
        result = function(*args, **kwargs)
        _check(result, signature.return_annotation)
        return result

    return wrapper


def _check(value: object, annotation: object) -> None:
    # shardlib checks its own types.
    if annotation not in (inspect.Signature.empty, Self) and not isinstance(annotation, ArrayType):
        typeguard.check_type(
            value, annotation, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
