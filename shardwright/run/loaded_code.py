"""Hashes code as Python has loaded it, whatever file it came from. Results of proofs are looked up by this hash.

Beginning with a step or a function, it follows the names that code uses: functions, classes, and values of modules. Of
a function it reads the bytecode without line numbers, the defaults, and the values in its closure. It does not read the
code of libraries, only the versions of some.
"""

import functools
import hashlib
import opcode
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.places import is_of_python
from shardwright.optimizers.rates import own_functions
from shardwright.run.config import Config
from shardwright.run.provenance import own_modules
from shardwright.run.reference import model_of
from shardwright.run.step import NAMES, Step

VERSIONS = ("einops", "jax", "jaxlib", "ml_dtypes", "numpy", "opt_einsum", "scipy")
"""Packages whose versions are hashed in place of their code."""
LIBRARIES = {*VERSIONS, "antlr4", "attr", "google_crc32c", "hydra", "jaxtyping", "jinja2", "markupsafe", "omegaconf"}
LIBRARIES |= {"packaging", "pybind11_builtins", "rich", "tensorstore", "typeguard", "wadler_lindig", "yaml"}
"""Packages whose code is not read: VERSIONS, and other dependencies of this project, which compute nothing in steps."""
_PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)}
_BUILTIN: tuple[Any, ...] = (str, int, float, bytes)
_UNREAD = (Config, Step)
"""Classes whose objects are not read: provenance.read_by returns the settings on which a step depends."""
_WITHIN = ("__wrapped__", "__func__", "__self__", "fget", "fset", "fdel", "func", "args", "keywords")
"""Attributes in which objects of libraries hold functions, such as those of functools.partial and property."""
_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl", "__slots__"}
_OF_CLASSES |= {"__dataclass_fields__", "__dataclass_params__", "__match_args__"}  # the methods made of them are read
_OF_CLASSES |= {"__slotnames__", "__firstlineno__", "__static_attributes__"}  # of copy, and of Python 3.13
_IMPORT = opcode.opmap["IMPORT_NAME"]
_DYNAMIC = {"__import__", "import_module", "modules"}
_known: dict[int, tuple[CodeType, str, tuple[str, ...]]] = {}


def digest_of_code(*roots: object) -> str:
    """Hashes the code that is reached from these objects, and the user's own modules.

    Own modules are read as a whole, because code may look up what they define by a name that it computes.
    """
    files = {str(path) for path in own_modules()}
    own = {name: module for name, module in sys.modules.items() if getattr(module, "__file__", None) in files}
    beside = {name: digest_of_module(own[name], name != "__main__") for name in sorted(own)}
    versions = [getattr(sys.modules.get(name), "__version__", None) for name in VERSIONS]
    return _Walk().digest(beside, versions, *roots)


def code_of(step: Step) -> list[object]:
    """Lists the objects from which all code that a step runs is reached, for digest_of_code."""
    return [step.model, step.spec, own_functions(step.config.optimizer), model_of(step.config)]


def digests_of(step: Step) -> list[str]:
    """Returns Step.digest of each program in NAMES, traced on the mesh of `step`."""
    return [step.other(name=name).digest for name in NAMES]


def digest_of_module(module: ModuleType, values: bool) -> str:
    """Hashes the functions and classes that a module defines and, if `values` is True, its other values."""
    walk = _Walk(module.__name__, values)
    walk.named(dict(_entries(module)))
    return walk.digest()


def _entries(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields name and value of all that a module defines or imports, except modules, sorted by name."""
    for name, x in sorted(vars(module).items()):
        if not isinstance(x, ModuleType) and (not name.startswith("__") or name == "__getattr__"):
            yield name, x


@functools.cache
def _is_library(name: str) -> bool:
    """Returns True if the module with this full name belongs to Python's standard library or to LIBRARIES."""
    top = name.partition(".")[0]
    if top in LIBRARIES:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    return top in sys.stdlib_module_names and (not file or is_of_python(file))


def _without_address(x: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(x))


def _read(code: CodeType) -> tuple[str, tuple[str, ...]]:
    """Returns a hash of bytecode, without line numbers and file, and the names that it uses."""
    if id(code) not in _known:
        inner = [_read(x) for x in code.co_consts if isinstance(x, CodeType)]
        names = [*code.co_names, *(name for _, of_inner in inner for name in of_inner)]
        is_dynamic = not _DYNAMIC.isdisjoint(code.co_names)
        if is_dynamic:
            names += [x for x in code.co_consts if isinstance(x, str)]
        if is_dynamic or _IMPORT in code.co_code[::2]:
            names.append("import")  # a keyword, so no name
        constants = [_constant(x) for x in code.co_consts if not isinstance(x, CodeType)]
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        of = code.co_varnames, code.co_freevars, code.co_cellvars, code.co_names, code.co_name
        parts = code.co_code, code.co_exceptiontable, constants, counts, of, [x for x, _ in inner]
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        _known[id(code)] = code, digest, tuple(dict.fromkeys(names))
    _, digest, names = _known[id(code)]
    return digest, names


def _constant(x: object) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_constant, x))})"
    return str(sorted(map(_constant, x))) if isinstance(x, frozenset) else repr(x)


def _modules_of(names: tuple[str, ...], known: Mapping[str, Any], found: list[ModuleType]) -> Iterator[ModuleType]:
    """Yields the modules that code with these `names` refers to: those `found` in its globals, and those it imports."""
    if "import" in names:
        package = known.get("__package__") or ""
        inside = [package.rsplit(".", i)[0] for i in range(package.count(".") + 1)]
        imported = [*names, *inside, *(f"{outer}.{name}" for outer in inside for name in names)]
        found += [sys.modules[name] for name in imported if name in sys.modules]
    seen = set()
    for module in found:  # the list grows
        if id(module) not in seen and not _is_library(module.__name__):
            seen.add(id(module))
            found += [x for name in names if isinstance(x := vars(module).get(name), ModuleType)]
            yield module


class _Walk:
    """A traversal that visits objects and all that they refer to, each once, and hashes them.

    Args:
        within: name of the only module whose functions and classes are read; None: all modules except libraries.
        values: False: reads only functions and classes, not other values, which tracing may change.
    """

    def __init__(self, within: str | None = None, values: bool = True):
        self._parts: list[str] = []
        self._within = within
        self._values = values
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []

    def digest(self, *roots: object) -> str:
        """Hashes these objects and all that they refer to."""
        self._refer_to(roots)
        for x in self._objects:  # the list grows
            self._parts.append("object")
            self._describe(x)
        return hashlib.sha256("\n".join(self._parts).encode()).hexdigest()

    def write(self, *parts: object) -> None:
        """Adds `parts` to the hash."""
        self._parts.append(repr(parts))

    def refer(self, x: Any) -> None:
        """Adds a plain value to the hash; another object by its index in the order of visits, to be visited later."""
        kind = type(x)
        if kind in _PLAIN:
            self._parts.append(repr(x))
        elif kind is tuple:
            self._parts.append(f"tuple {len(x)}")
            self._refer_to(x)
        elif kind is set or kind is frozenset:
            self._parts.append(f"set {len(x)}")
            self._refer_to(sorted(x, key=_without_address))
        else:
            number = self._numbers.setdefault(id(x), len(self._objects))
            self._parts.append(f"object {number}")
            if number == len(self._objects):
                self._objects.append(x)

    def _refer_to(self, parts: Any) -> None:
        for part in parts:
            self.refer(part)

    def named(self, parts: Mapping[Any, Any]) -> None:
        """Adds names and their values to the hash. If `self._values` is False, only those that hold code."""
        for name, x in parts.items():
            if self._values or not (type(x) in _PLAIN or type(x) is tuple or _is_state(x)):
                self._parts.append(name)
                self.refer(x)

    def _reads(self, module: str) -> bool:
        return module == self._within if self._within else not _is_library(module)

    def _describe(self, x: Any) -> None:
        if isinstance(x, FunctionType):
            self._function(x)
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, ModuleType):
            self.write("module", x.__name__)
        elif isinstance(x, MemberDescriptorType | GetSetDescriptorType):
            self.write("slot", x.__name__)
        elif not self._values and _is_state(x):
            self.write(type(x).__qualname__)
        else:
            self._instance(x)

    def _function(self, f: FunctionType) -> None:
        known = f.__globals__
        if not self._reads(known.get("__name__", "")):
            return self.write(f.__module__, f.__qualname__)
        digest, names = _read(f.__code__)
        self._parts.append(digest)
        if f.__defaults__ or f.__kwdefaults__:
            self._refer_to((f.__defaults__, f.__kwdefaults__))
        if f.__closure__:
            cells = [_content(cell) for cell in f.__closure__]
            self.named(dict(zip(f.__code__.co_freevars, cells, strict=True)))
        if f.__dict__:
            self.named(f.__dict__)
        if self._values and f.__annotations__:
            self.write(_without_address(f.__annotations__))
        if self._within:
            return None
        modules = []
        for name in names:
            if name in known:
                x = known[name]
                self.refer(x)
                if type(x) is ModuleType and not _is_library(x.__name__):
                    modules.append(x)
        if modules or "import" in names:
            for module in _modules_of(names, known, modules):
                self.named({name: vars(module)[name] for name in (*names, "__getattr__") if name in vars(module)})
        return None

    def _class(self, kind: type) -> None:
        self.write(kind.__module__, kind.__qualname__)
        if self._reads(kind.__module__):
            self._refer_to((*kind.__bases__, type(kind)))
            self.named(
                {name: x for name, x in sorted(vars(kind).items()) if name not in _OF_CLASSES and not _is_empty(x)}
            )

    def _instance(self, x: Any) -> None:
        self.refer(type(x))
        if isinstance(x, np.ndarray | jax.Array):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            x = np.asarray(jax.random.key_data(x) if is_key else x)
            return self.write(x.shape, str(x.dtype), x.tobytes())
        items = True
        if isinstance(x, dict | MappingProxyType):
            for name in sorted(x, key=_without_address):  # it may be made of a set
                self._refer_to((name, x[name]))
        elif isinstance(x, list | tuple | deque):
            self._refer_to(x)
        elif plain := next((kind for kind in _BUILTIN if isinstance(x, kind)), None):
            self._parts.append(plain.__repr__(x))  # of an enum, or another class below it
        else:
            items = False
        attributes = _attributes(x)
        self.named(attributes)
        return None if items or attributes or isinstance(x, _UNREAD) else self.write(_without_address(x))


def _attributes(x: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name; if its class is a library's, only functions and plain values."""
    kind = type(x)
    if kind in _UNREAD:
        return {}
    held = {**getattr(x, "__dict__", {})}
    if _is_library(kind.__module__):
        held = {name: value for name, value in held.items() if type(value) in _PLAIN or not _is_state(value)}
        return held | {name: value for name in _WITHIN if (value := getattr(x, name, None)) is not None}
    hidden = {name for name, value in _members(kind) if isinstance(value, functools.cached_property)}
    hidden |= {f.name for f in getattr(kind, "__dataclass_fields__", {}).values() if not (f.init or f.compare)}
    slots = [name for name, value in _members(kind) if isinstance(value, MemberDescriptorType)]
    held |= {name: getattr(x, name) for name in slots if hasattr(x, name)}
    return {name: value for name, value in held.items() if name not in hidden}


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        yield from vars(base).items()


def _is_state(x: object) -> bool:
    """Returns True if tracing may change an object: if it is not a function, class or module, and holds none."""
    holds = isinstance(x, property | classmethod | staticmethod | functools.cached_property)
    holds |= callable(x) and _is_library(type(x).__module__)
    return not (holds or isinstance(x, FunctionType | type | ModuleType | MemberDescriptorType | GetSetDescriptorType))


def _is_empty(x: object) -> bool:
    """Returns True for an empty dict, such as the annotations that Python adds to a class when they are read."""
    return type(x) is dict and not x


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
