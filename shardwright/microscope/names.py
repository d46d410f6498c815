"""The name that the source gives to what a line computes."""

import ast
import functools
import linecache


@functools.cache
def function_and_target(file: str, line: int) -> tuple[str, str]:
    """The function around a line, with its class, and what the statement there assigns to: `Llama.layer` and `v`.

    Each is "" where there is none.
    """
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):  # a file that has changed since it was imported
        return "", ""
    around = [node for node in nodes if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno]
    owners = [node.name for node in around if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    targets = [node.targets[0] for node in around if isinstance(node, ast.Assign)]
    targets += [node.target for node in around if isinstance(node, ast.AnnAssign)]
    return ".".join(owners), ast.unparse(targets[-1]) if targets else ""
