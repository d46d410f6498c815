"""Proves, before the first step of a run, that its steps compute on this mesh what they compute on one device."""

import ast
import dataclasses
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh

from shardlib.axes import OPTIONAL, PIPELINE_AXIS
from shardlib.interpret import digest_of
from shardlib.places import place
from shardlib.proof.check import Finding, on_one_device, prove, prove_function, raise_for, tracing
from shardlib.proof.domain import BLOCKS
from shardwright.inspect.fresh import OTHER_VALUES, reimport
from shardwright.modeling import context
from shardwright.modeling.attention_calls import Call, path_of
from shardwright.modeling.masks import numbers_in
from shardwright.optimizers.rates import own_functions
from shardwright.run.config import TrainingConfig
from shardwright.run.loaded_code import code_of, digest_of_code, digests_of
from shardwright.run.provenance import keep_result, read_by
from shardwright.run.step import NAMES, Step
from shardwright.run.stores import in_all_processes

OF_MACHINES = ("devices", "local_devices", "device_count", "local_device_count", "process_count", "process_index")
OF_MACHINES += ("get_mesh",)
"""Functions of JAX that a step must not call: their results are the same in a trace for another mesh."""
SHOWN = 5
"""Number of findings that an error shows."""


class Unproved(Exception):
    """Raised if nothing is known of a program; says why."""


def check_steps(step: Step) -> None:
    """Raises unless the steps compute on their mesh what they compute on one device. They are not run.

    With pipeline stages, the parts that stages run, and the embedding and loss, which all stages run together, are
    checked one after the other and compared with what one device runs; shardlib.schedules checks the schedule.

    Args:
        step: one of the programs, as it is run. All of them are checked, once for the same programs and code.

    Raises:
        ShardError: names the lines of the source that are wrong or not proved, with the values there and the remedy.
    """

    def key() -> tuple:
        return digests_of(step), read_by(step), devices_of(step.mesh)

    refuse(lambda: find_unsound(step), key, *code_of(step))


def check_program(program: Any, args: object, *settings: Any) -> None:
    """Checks a jitted program, which calls typed_shard_map, like check_steps, for arguments of these shapes.

    `settings` are what its source reads besides the arguments.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)

    def trace() -> Any:
        return program.trace(*shapes).jaxpr

    def key() -> tuple:
        return digest_of(trace()), program.__name__, settings, repr(shapes)

    refuse(lambda: prove_function(trace), key, program)


def devices_of(mesh: Any) -> tuple:
    """What a proof depends on of a mesh, of devices or abstract: its sizes, and the kind of its devices."""
    device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    return (*mesh.shape.items(), device and device.device_kind)


def refuse(find: Callable[[], list[Finding]], key: Callable[[], object], *code: object) -> None:
    """Raises ShardError for what `find` finds, unless all was proved before for `key` and `code`.

    `find` may raise Unproved. If several processes call this with the same program, as they all must, the first one
    proves it and keeps the record.

    Args:
        find: proves a program.
        key: returns the digest of the program on its mesh, and the settings that it reads.
        code: functions and objects from which the code that it runs is reached. On one device that may be other code.
    """

    def key_here() -> tuple:
        return key(), digest_of_code(*code), tuple(jax.sharding.get_abstract_mesh().shape.items())

    def prove() -> dict:
        return keep_result(
            "soundness", key_here, lambda: raise_for(find(), SHOWN) or {}, may_keep=lambda _: not OTHER_VALUES
        )

    in_all_processes(lambda: prove() if jax.process_index() == 0 else {}, Unproved)


def find_unsound(step: Step) -> list[Finding]:
    """Finds what is wrong with the programs of a step on its mesh. The argument is that of check_steps.

    An AttentionMask runs inside per-device code in every implementation of attention except einsum. So the steps are
    proved first with einsum, which applies the mask to all pairs, and then as they run.
    shardwright.modeling.attention_calls compares the implementations.
    """
    kinds = [kind for kind in type(step.model).__mro__ if kind.__module__ not in ("builtins", "typing")]
    makers = [step.spec.init_state, step.spec.make_training_step, step.spec.make_evaluation_step]
    makers += own_functions(step.config.optimizer)
    if found := list(dict.fromkeys(finding for part in (*makers, *kinds) for finding in _machines(part))):
        return found
    with reimport(step):  # raises if its functions are not those of its files
        pass
    found, is_einsum = _check_rules(step)
    found = found or _unsound(step if is_einsum else step.other("einsum attention"), to_single=True)
    return found if found or is_einsum else _unsound(step)


def _unsound(step: Step, to_single: bool = False) -> list[Finding]:
    """find_unsound for one form of attention. `to_single`: also compare with what a single device runs."""
    t = step.config.training
    mesh = cast(AbstractMesh, getattr(step.mesh, "abstract_mesh", step.mesh))
    in_order = ["layers in order"] * (mesh.shape.get(PIPELINE_AXIS, 1) > 1)
    sizes = dict(mesh.shape)
    as_it_runs = iter([step.other(*in_order, planned=sizes)])

    def programs(step: Step) -> dict[str, tuple[Any, list]]:
        found = {name: step.other(name=name) for name in NAMES}
        return {name: (traced.jaxpr, traced.types) for name, traced in found.items()}

    def trace(at: AbstractMesh, *forms: str) -> dict[str, tuple[Any, list]]:
        if own := next(as_it_runs, None):
            return programs(own)
        with reimport(step.other(*forms, "one chunk", mesh=at, planned=sizes)) as alone:
            return programs(alone)

    singles = {}
    if to_single and not {*OPTIONAL}.isdisjoint(mesh.shape):
        singles[trace] = False
    if to_single and t.gather_weights == "auto" and math.prod(mesh.shape.get(axis, 1) for axis in "cde") > 1:
        singles[lambda at: trace(at, "gathered ahead")] = True  # casts weights elsewhere
    found = prove(lambda at: trace(at, *in_order), mesh, singles)
    if found and (of_all := step.other("one chunk")) is not step:
        others = {_problem(finding): finding for finding in _unsound(of_all, to_single)}
        found = [others.get(_problem(x)) or _of_chunks(x, t) for x in found]
    return [dataclasses.replace(x, form=step.other(*in_order).form) for x in found]


def _check_rules(step: Step) -> tuple[list[Finding], bool]:
    """Numbers in a model's masks that differ on one device; and True if einsum computes all attention."""
    mesh = getattr(step.mesh, "abstract_mesh", step.mesh)
    one = on_one_device(mesh, OPTIONAL)

    def calls(step: Step) -> tuple[list[Call], bool]:
        found = [*step.other(name="evaluation").calls, *step.calls]
        with tracing(step.mesh):
            is_einsum = all(path_of(step.forward, call) == "einsum" for call in found)
            return found, is_einsum and context.way_of(step.config.training) in ("gather", "whole")

    here, is_einsum = calls(step.other(mesh=mesh))
    try:
        with reimport(step.other(mesh=one)) as alone:
            there, _ = calls(alone)
    except Exception:  # whatever the program does there, the proof of the steps reports it
        return [], is_einsum
    found = {}
    for a, b in zip(here, there, strict=False):
        for parts in itertools.zip_longest(a.pattern.parts(), b.pattern.parts()):
            numbers = list(map(numbers_in, parts))
            if numbers[0] != numbers[1]:
                where = next((part.made for part in parts if hasattr(part, "made")), a.pattern.made)
                shown = [part if number else "none" for part, number in zip(parts, numbers, strict=True)]
                problem = f"{where}: the attention mask has {shown[0]} on this mesh and {shown[1]} on one device"
                found[problem] = Finding(f"{problem}\n  remedy: {OF_WHOLE}", is_wrong=True)
    return [*found.values()], is_einsum


OF_WHOLE = (
    "let an attention mask use global sizes: shardops.size('L') is the global size of a dim, and self.config "
    "has those of the model"
)


def _problem(finding: Finding) -> str:
    return finding.text.partition("\n")[0]


def _of_chunks(finding: Finding, t: TrainingConfig) -> Finding:
    """Replaces the remedy of a finding that only occurs with the loss in chunks."""
    chunk = t.loss_chunk or t.seq_len
    text, _, _ = finding.text.replace(f"{BLOCKS}{t.seq_len // chunk}", "chunks").partition("\n  remedy: ")
    remedy = f"training.loss_chunk={chunk} takes that many positions at a time: count each alone, or set it to null"
    return dataclasses.replace(finding, text=f"{text}\n  remedy: {remedy}")


def _package(name: str) -> str:
    return name.partition(".")[0]


def _machines(part: Callable[..., Any]) -> Iterator[Finding]:
    """Where `part`, or what it names in its module, asks JAX about the machine, which is the same on all meshes."""
    lines, _ = inspect.findsource(sys.modules[part.__module__])
    defined: dict[str, Any] = {}
    tree = ast.parse("".join(lines))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    of_modules = [x for node in imports if isinstance(node, ast.Import) for x in node.names]
    packages = {"jax"} | {x.asname for x in of_modules if x.asname and _package(x.name) == "jax"}
    aliases = [x for node in imports if _package(getattr(node, "module", None) or "") == "jax" for x in node.names]
    imported = {alias.asname or alias.name for alias in aliases if alias.name in OF_MACHINES}
    node: Any
    for node in tree.body:
        stored = (x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
        defined |= dict.fromkeys([node.name] if hasattr(node, "name") else stored, node)
    reached = [name for name in (part.__name__,) if name in defined]
    for name in reached:  # the list grows
        names = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        reached += sorted(names & defined.keys() - {*reached})
    for node in (node for name in reached for node in ast.walk(defined[name])):
        name = getattr(node, "id", getattr(node, "attr", ""))
        named = isinstance(node, ast.Name) and node.id in imported
        is_attribute = isinstance(node, ast.Attribute) and node.attr in OF_MACHINES
        if named or (is_attribute and _package(ast.unparse(node)) in packages):
            where = place(inspect.getsourcefile(sys.modules[part.__module__]) or "?", node.lineno)
            problem = f"{ast.unparse(node)} is the same on all meshes, so the check cannot see what depends on it"
            remedy = "use shardops.axis_size('r d'), the number of devices along axes"
            yield Finding(f"{where}: {problem}\n  remedy: {remedy}")
