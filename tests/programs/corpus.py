"""The programs that show whether the check is right: what is right is accepted, what is wrong is
refused.
"""

import inspect
import linecache

from tests.programs import methods, primitives, program, wrong  # noqa: F401 (they register programs)
from tests.programs.program import Program

RIGHT, WRONG = program.RIGHT, program.WRONG
FILES = {inspect.getsourcefile(program.body) for program in RIGHT + WRONG}


def is_at_its_line(program: Program, file: str, line: int) -> bool:
    """At the line that ends in `# here`, in the program or in what it calls; without one, anywhere
    in the program.
    """
    (path,) = (path for path in FILES if path.endswith(file))
    source, start = inspect.getsourcelines(program.body)
    is_inside = path == inspect.getsourcefile(program.body) and start < line < start + len(source)
    is_marked = linecache.getline(path, line).rstrip().endswith("# here")
    return is_marked or (is_inside and not any(text.rstrip().endswith("# here") for text in source))
