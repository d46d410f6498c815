"""The programs that show whether the analysis is right: what is right is accepted, what is wrong is refused."""

from tests.support import mutated_programs, right_methods, right_programs, wrong_programs

RIGHT = right_programs.PROGRAMS + right_methods.PROGRAMS
WRITTEN, MUTATED = wrong_programs.PROGRAMS, mutated_programs.PROGRAMS
WRONG = WRITTEN + MUTATED
