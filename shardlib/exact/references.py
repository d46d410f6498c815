"""References: functions in JAX that are run in place of primitives and kernels without rules."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_REFERENCES: dict[str, Callable[..., Any]] = {}


@contextlib.contextmanager
def reference(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Lets exact arithmetic run a function in place of a primitive or kernel that has no rule.

    A verdict is then about the program that calls `function` there. That the kernel computes the
    same is left to another test.

    Args:
        name: of a primitive, or of the function of a pallas_call or pure_callback, as the message
            about a primitive without a rule has it.
        function: gets the operands on one device; of a primitive, also its parameters, as keyword
            arguments. Returns what the kernel returns, in JAX that can be traced.

    >>> with reference("double_on_host", lambda x: 2 * x):
    ...     check(program, x, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    """
    before = dict(_REFERENCES)
    _REFERENCES[name] = function
    try:
        yield
    finally:
        _REFERENCES.clear()
        _REFERENCES.update(before)


def kernel_of(eqn: Any) -> str:
    """Returns the name of the function that an equation runs as a kernel; "" if it runs none."""
    params = eqn.params
    if eqn.primitive.name == "pallas_call":
        return params["name"] or params["jaxpr"].debug_info.func_name
    callback = params.get("callback")
    return getattr(getattr(callback, "callback_func", callback), "__name__", "")


def reference_of(eqn: Any) -> Callable[..., Any] | None:
    """Returns a function of the operands that is run in place of an equation; None: itself."""
    name = eqn.primitive.name
    if name in _REFERENCES:
        return lambda *operands: _REFERENCES[name](*operands, **eqn.params)
    return _REFERENCES.get(kernel_of(eqn)) if _REFERENCES else None
