"""Checks the jaxtyping annotations of host-side NumPy code while tests run, dims agreeing within each call.

    with checked("tools.flat_tokens"):
        from tools import flat_tokens

Only the first import of a module counts, so each test file that imports such a module does it in this way.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

import jaxtyping
import typeguard

from shardlib.shardtypes import ArrayType


def checked(*modules: str) -> AbstractContextManager:
    return jaxtyping.install_import_hook(modules, f"{__name__}.check_annotations")


def check_annotations(function: Callable) -> Callable:
    """typeguard's own decorator cannot be used: it reads annotations from the source, where dims look like Python."""
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
        typeguard.check_type(value, annotation, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS)
