"""Each primitive of equations._KINDS against what its kind says: by its results on random numbers, entry by entry."""

import numpy as np
import pytest
from jax import lax

from shardlib import equations
from tests.support.primitive_calls import NO_FUNCTION, call_of

pytestmark = pytest.mark.quick

ENTRYWISE = ("linear", "addition", "product", "comparison", "selection", "nonlinear")


def primitives(*kinds):
    return sorted({(kind, name) for kind in kinds for name in equations._KINDS[kind].split()})


def depends(call, operands, k):
    """For each entry of operand k, the entries of the result that change with it."""
    before = np.asarray(call(*operands)[0])
    found = {}
    for at in np.ndindex(operands[k].shape):
        changed = []
        for other in (0, 0.37, 5, np.nan)[: 4 if operands[k].dtype.kind in "fc" else 3]:
            x = operands[k].copy()
            x[at] = other
            after = np.asarray(call(*[x if i == k else y for i, y in enumerate(operands)])[0])
            changed.append(~((before == after) | ((before != before) & (after != after))))
        found[at] = {tuple(map(int, where)) for where in np.argwhere(np.any(changed, axis=0))}
    return found


@pytest.mark.parametrize(("kind", "name"), primitives(*ENTRYWISE))
def test_an_entry_depends_on_that_entry_alone(kind, name):
    if (found := call_of(name)) is None:
        assert name in NO_FUNCTION or not hasattr(lax, name)
        pytest.skip("this jax has no function that calls it")
    call, operands = found
    if name in ("eq", "ne"):
        operands = operands[:1] * 2  # else one entry more that differs changes nothing
    shape = np.asarray(call(*operands)[0]).shape
    some = False
    for k, x in enumerate(operands):
        if x.shape == shape:
            for at, where in depends(call, operands, k).items():
                assert where <= {at}
                some |= bool(where)
    assert some, "it depends on none of its operands"


@pytest.mark.parametrize(("kind", "name"), primitives("linear", "addition"))
def test_a_linear_one_is_linear(kind, name):
    found = call_of(name)
    assert found is not None
    call, operands = found
    others = [np.flip(x) for x in operands]
    sums = [x + y for x, y in zip(operands, others, strict=True)]
    a, b, both = (np.asarray(call(*xs)[0]) for xs in (operands, others, sums))
    # Rounding: reduce_precision and a cast to f16 keep ten bits of the mantissa.
    np.testing.assert_allclose(both, a + b, rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize(("kind", "name"), primitives("view"))
def test_a_view_has_the_entries_of_its_operand(kind, name):
    call, (x,) = call_of(name)
    assert {*np.asarray(call(x)[0]).ravel().tolist()} == {*x.ravel().tolist()}


@pytest.mark.parametrize(("kind", "name"), primitives("reduction"))
def test_a_reduction_takes_the_entries_along_its_axes(kind, name):
    call, (x,) = call_of(name)
    if x.dtype == bool:
        x[:] = name == "reduce_and"  # so that each entry decides
    found = depends(call, [x], 0)
    assert all(where <= {at[:1]} for at, where in found.items())
    assert any(found.values())


@pytest.mark.parametrize(("kind", "name"), primitives("running"))
def test_a_running_one_takes_the_entries_before(kind, name):
    call, (x,) = call_of(name)
    for at, where in depends(call, [x], 0).items():
        assert all(row == at[0] and column >= at[1] for row, column in where)
