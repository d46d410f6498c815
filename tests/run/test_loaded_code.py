"""The hash of the code that Python holds: what changes it, and what does not."""

import importlib
import os
import subprocess
import sys
import types

import pytest

from shardwright.run.loaded_code import digest_of_code, digest_of_module
from shardwright.run.provenance import ROOT

pytestmark = pytest.mark.quick
HEAD = """
import dataclasses
import functools
import jax
import jax.numpy as jnp
import numpy as np
"""


def module_of(text: str, name: str = "a_module") -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(HEAD + text, f"/elsewhere/{name}.py", "exec"), vars(module))
    return module


CHANGES = {
    "a constant": ("f = lambda x: x * 2.0", "f = lambda x: x * 1.0"),
    "its type": ("f = lambda x: x * 1", "f = lambda x: x * 1.0"),
    "a truth value": ("f = lambda x: x * 1", "f = lambda x: x * True"),
    "a name": ("f = lambda x: jnp.sin(x)", "f = lambda x: jnp.cos(x)"),
    "an argument": ("f = lambda x, y: x - y", "f = lambda y, x: x - y"),
    "a nested function": ("def f(x):\n return (lambda: 1.0)() * x", "def f(x):\n return (lambda: 2.0)() * x"),
    "a default": ("def f(x, by=1.0):\n return x * by", "def f(x, by=2.0):\n return x * by"),
    "a keyword": ("def f(x, *, by=1.0):\n return x * by", "def f(x, *, by=2.0):\n return x * by"),
    "a closure": ("f = (lambda by: lambda x: x * by)(1.0)", "f = (lambda by: lambda x: x * by)(2.0)"),
    "an attribute": ("f = lambda x: x\nf.by = 1.0", "f = lambda x: x\nf.by = 2.0"),
    "another function": ("g = lambda: 1.0\nf = lambda x: x * g()", "g = lambda: 2.0\nf = lambda x: x * g()"),
    "a value": ("N = 1.0\nf = lambda x: x * N", "N = 2.0\nf = lambda x: x * N"),
    "a table": ("N = {'a': [1.0]}\nf = lambda x: x * N['a'][0]", "N = {'a': [2.0]}\nf = lambda x: x * N['a'][0]"),
    "an array": ("N = np.zeros(9999)\nf = lambda x: x + N", "N = np.zeros(9999)\nN[5] = 1\nf = lambda x: x + N"),
    "a function in a table": ("N = {1: lambda: 1.0}\nf = lambda: N[1]()", "N = {1: lambda: 2.0}\nf = lambda: N[1]()"),
    "a method": ("class f:\n def g(self):\n  return 1.0", "class f:\n def g(self):\n  return 2.0"),
    "a property": (
        "class f:\n @property\n def g(self):\n  return 1",
        "class f:\n @property\n def g(self):\n  return 2",
    ),
    "a class method": (
        "class f:\n @classmethod\n def g(cls):\n  return 1",
        "class f:\n @classmethod\n def g(cls):\n  return 2",
    ),
    "a base": ("class A:\n by = 1.0\nclass f(A):\n pass", "class A:\n by = 2.0\nclass f(A):\n pass"),
    "a metaclass": (
        "class M(type):\n def g(cls):\n  return 1\nclass f(metaclass=M):\n pass",
        "class M(type):\n def g(cls):\n  return 2\nclass f(metaclass=M):\n pass",
    ),
    "a field": ("@dataclasses.dataclass\nclass f:\n by: int = 1", "@dataclasses.dataclass\nclass f:\n by: int = 2"),
    "a field's factory": (
        "@dataclasses.dataclass\nclass f:\n by: list = dataclasses.field(default_factory=lambda: [1])",
        "@dataclasses.dataclass\nclass f:\n by: list = dataclasses.field(default_factory=lambda: [2])",
    ),
    "an object": (
        "class A:\n def __init__(self, by):\n  self.by = by\na = A(1.0)\nf = lambda: a.by",
        "class A:\n def __init__(self, by):\n  self.by = by\na = A(2.0)\nf = lambda: a.by",
    ),
    "jit": ("f = jax.jit(lambda x: x)", "f = jax.jit(lambda x: x + 1)"),
    "partial": ("f = functools.partial(max, 1)", "f = functools.partial(max, 2)"),
    "a cache": ("f = functools.cache(lambda: 1)", "f = functools.cache(lambda: 2)"),
    "a name of a library": (
        "@functools.wraps(jnp.sin)\ndef f(x):\n return x",
        "@functools.wraps(jnp.sin)\ndef f(x):\n return x + 1",
    ),
    "a backward pass": (
        "f = jax.custom_vjp(lambda x: x)\nf.defvjp(lambda x: (x, x), lambda r, g: (g,))",
        "f = jax.custom_vjp(lambda x: x)\nf.defvjp(lambda x: (x, x), lambda r, g: (r,))",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_code_has_another_hash(what):
    before, after = CHANGES[what]
    assert digest_of_code(module_of(before).f) != digest_of_code(module_of(after).f)
    assert digest_of_code(module_of(before).f) == digest_of_code(module_of("# a comment\n\n" + before).f)


@pytest.mark.parametrize(
    "body",
    [
        "import a_package.part\n return a_package.part.g()",
        "from a_package import part\n return part.g()",
        "from a_package.part import g\n return g()",
        "return __import__('a_package.part').part.g()",
    ],
)
def test_a_module_that_a_function_imports_is_read(tmp_path, monkeypatch, body):
    """Wherever it is installed."""
    folder = tmp_path / "site-packages" / "a_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = set()
    for number in ("1.0", "2.0", "2.0"):
        (folder / "part.py").write_text(f"def g():\n return {number}")
        for name in ("a_package", "a_package.part"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        importlib.import_module("a_package.part")
        found.add(digest_of_code(module_of(f"def f():\n {body}").f))
    assert len(found) == 2


def test_values_are_told_from_functions():
    """A trace may change values, not functions."""
    before = module_of("N = {}\nby = 1.0\nclass A:\n by = 1.0\ndef f():\n return N, by")
    after = module_of("N = {1: 2}\nby = 2.0\nclass A:\n by = 2.0\ndef f():\n return N, by")
    other = module_of("N = {}\nby = 1.0\nclass A:\n by = 1.0\ndef f():\n return by, N")
    assert digest_of_module(before, values=False) == digest_of_module(after, values=False)
    assert len({digest_of_module(module, values=True) for module in (before, after, other)}) == 3
    assert digest_of_module(before, values=False) != digest_of_module(other, values=False)


HASHES = """
import jax
from shardwright.run.loaded_code import digest_of_code
from shardwright.run.loaded_code import code_of
from tests.support import tiny
with jax.set_mesh(tiny.mesh("one device")):
    step = tiny.step(tiny.config())
    before = digest_of_code(*code_of(step))
    step.digest
    assert digest_of_code(*code_of(step)) == before
    print(before)
"""


@pytest.mark.long
def test_another_start_has_the_same_hash():
    """Whatever the order of its sets, before and after the step is traced."""
    found = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", HASHES], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
