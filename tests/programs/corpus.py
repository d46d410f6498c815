"""The programs that show whether the analysis is right: what is right is accepted, what is wrong is refused."""

from tests.programs import mutated, primitives, program, wrong  # noqa: F401 (they register programs)

RIGHT, WRITTEN, MUTATED = program.RIGHT, program.WRONG, mutated.PROGRAMS
WRONG = WRITTEN + MUTATED
