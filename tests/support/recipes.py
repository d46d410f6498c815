"""The programs of docs/recipes, importable, and modules of edited copies of the source."""

import contextlib
import importlib
import linecache
import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
sys.path.append(str(RECIPES))  # as PYTHONPATH=docs/recipes does

SOURCE = (ROOT / "train.py").read_text()


@contextlib.contextmanager
def module_of(source: str, name: str = "changed_train"):
    """The module of a changed train.py, or of another file."""
    module = types.ModuleType(name)
    module.__file__ = f"<{name} {hash(source)}>"
    linecache.cache[module.__file__] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        module.__file__,
    )
    sys.modules[name] = module
    try:
        exec(compile(source, module.__file__, "exec"), vars(module))
        yield module
    finally:
        del sys.modules[name], linecache.cache[module.__file__]


@contextlib.contextmanager
def edited_module(file: str, source: str):
    """The module of a file of the library with another text, also for what the other modules
    imported from it.
    """
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    before, name = dict(vars(module)), f"<changed_{Path(file).stem} {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), vars(module))
    changed = ((old, vars(module)[key]) for key, old in before.items() if callable(old))
    new = {id(old): now for old, now in changed if now is not old}
    names_of = [
        vars(x) for key, x in sys.modules.items() if key.startswith(("shardwright.", "train"))
    ]
    imported = [
        (names, key, old) for names in names_of for key, old in names.items() if id(old) in new
    ]
    for names, key, old in imported:
        names[key] = new[id(old)]
    try:
        yield
    finally:
        for names, key, old in imported:
            names[key] = old
        vars(module).update(before)
        del linecache.cache[name]


@contextlib.contextmanager
def train_with(files: dict[str, str], name: str = "changed_train"):
    """The module of train.py with other texts of itself and of modules that it imports, by their
    paths.
    """
    source = files.get("train.py", SOURCE)
    with contextlib.ExitStack() as stack:
        for file in files.keys() - {"train.py"}:
            if not file.startswith("shardwright/models/"):
                stack.enter_context(edited_module(file, files[file]))
                continue
            path, other = file.removesuffix(".py").replace("/", "."), f"changed_{Path(file).stem}"
            package, _, module = path.rpartition(".")
            stack.enter_context(module_of(files[file], other))
            source = source.replace(f"from {path} import", f"from {other} import")
            imports = rf"^from {re.escape(package)} import .*\b{module}\b.*"
            source = re.sub(imports, rf"\g<0>; import {other} as {module}", source, flags=re.M)
        yield stack.enter_context(module_of(source, name))
