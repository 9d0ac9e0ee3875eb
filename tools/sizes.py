"""List what has grown: files of fxamp/ over 350 lines, functions over 60. A warning, not a failure."""

import ast
import pathlib

MAX_FILE, MAX_FUNCTION = 350, 60


def main() -> None:
    for path in sorted(pathlib.Path("fxamp").rglob("*.py")):
        text = path.read_text()
        lines = text.count("\n")
        if lines > MAX_FILE:
            print(f"{path}: {lines} lines (more than {MAX_FILE})")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    print(f"{path}:{node.lineno} {node.name}: {length} lines (more than {MAX_FUNCTION})")


if __name__ == "__main__":
    main()
