"""The house rules that a linter does not know: sizes, words, forbidden constructs, one place for each thing.

`python tools/check.py` prints lines by folder and every broken rule; exit status 1 if there is one.
tests/host/test_house.py runs the same functions, and shows that each can fail.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 500
FUNCTION_LINES = 60

# Rule S1: nothing that can turn bytes into code or objects.
FORBIDDEN_MODULES = {
    "pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "multiprocessing",
    "jsonpickle",
    "joblib",
}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list"}

# Where a word may not stand: (folders, pattern of whole words, why).
WORDS = [
    (("trine/scheduler", "trine/cache"), r"\b(prefill|decode|decoding)\b(?!\()", "there is only gap"),
    (("trine/models",), r"\brank\b", "a model does not know of ranks"),
    (("trine",), r"\b(TODO|FIXME|XXX)\b", "no TODOs"),
]
# Rule A3: the only files that may reach out of the machine.
OUTGOING = {"trine/loader/hub.py", "trine/bench/client.py"}
OUTGOING_MODULES = {"requests", "urllib.request", "http.client", "aiohttp", "httpx", "huggingface_hub"}
TRITON = "trine/kernels/jit/"  # so that everything else imports on a machine without it
CUDA = "trine/platforms/cuda.py"  # others may compare a device's kind with the word, and ask the platform


def sources(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Every Python file of the package and its tools: path from the root, text."""
    for folder in ("trine", "tools"):
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def sizes(name: str, text: str) -> Iterator[str]:
    lines = text.count("\n") + 1
    if lines > FILE_LINES and "generated: " not in text[:200]:
        yield f"{name}: {lines} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def constructs(name: str, text: str) -> Iterator[str]:
    """Rule S1, `global`, environment variables, and outgoing connections, each in its one place."""
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        for module in _imports(node):
            top = module.partition(".")[0]
            if top == "triton" and name.startswith("trine/") and not name.startswith(TRITON):
                yield f"{name}:{line}: imports triton; only {TRITON} does"
            if top in FORBIDDEN_MODULES:
                yield f"{name}:{line}: imports {module} (rule S1)"
            if top in OUTGOING_MODULES and name.startswith("trine/") and name not in OUTGOING:
                yield f"{name}:{line}: imports {module}; only {', '.join(sorted(OUTGOING))} may connect outwards"
        for path in _paths(node):
            if path in OUTGOING_MODULES and "." in path and name.startswith("trine/"):
                yield f"{name}:{line}: imports {path}, which connects outwards"
            if path == "torch.cuda" and name != CUDA:
                yield f"{name}:{line}: imports torch.cuda outside platforms/cuda.py"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"{name}:{line}: calls {node.func.id} (rule S1)"
        if isinstance(node, ast.Call) and any(
            k.arg == "shell" and getattr(k.value, "value", None) for k in node.keywords
        ):
            yield f"{name}:{line}: runs a shell"
        if isinstance(node, ast.Attribute):
            yield from _attribute(name, node)
        if isinstance(node, ast.Global):
            yield f"{name}:{line}: global {', '.join(node.names)}; state belongs in an object"


def _attribute(name: str, node: ast.Attribute) -> Iterator[str]:
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if (owner, node.attr) in FORBIDDEN_ATTRIBUTES or node.attr in FORBIDDEN_METHODS:
        yield f"{name}:{node.lineno}: uses {owner}.{node.attr} (rule S1)"
    if (
        owner == "os"
        and node.attr in ("environ", "getenv", "putenv")
        and name.startswith("trine/")
        and name != "trine/config.py"
    ):
        yield f"{name}:{node.lineno}: os.{node.attr}; only trine/config.py reads the environment"
    if owner == "torch" and node.attr == "cuda" and name != CUDA:
        yield f"{name}:{node.lineno}: torch.cuda outside platforms/cuda.py"


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


def _paths(node: ast.AST) -> list[str]:
    """What may be a module of all that is imported: of `from a import b` also a.b."""
    found = _imports(node)
    if isinstance(node, ast.ImportFrom) and found:
        found += [f"{found[0]}.{alias.name}" for alias in node.names]
    return found


def words(name: str, text: str) -> Iterator[str]:
    """The glossary's forbidden words, by folder, and names that say nothing."""
    for folders, pattern, why in WORDS:
        if name.startswith(folders):
            for number, line in enumerate(text.splitlines(), 1):
                if found := re.search(pattern, line):
                    yield f"{name}:{number}: says {found.group(0)!r}: {why}"
    stem = Path(name).stem
    if re.search(r"utils?$|helpers?$|^base_", stem) or (
        stem == "manager" and name != "trine/cache/manager.py"
    ):
        yield f"{name}: a file name that does not say what is in it"
    if name.startswith("trine/") and stem != "__init__" and not ast.get_docstring(ast.parse(text)):
        yield f"{name}: no header that says what it is for"


def broken(name: str, text: str) -> list[str]:
    return [*sizes(name, text), *constructs(name, text), *words(name, text)]


def main() -> int:
    lines: Counter[str] = Counter()
    faults: list[str] = []
    for name, text in sources():
        parts = name.split("/")
        lines["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += text.count("\n")
        faults += broken(name, text)
    for folder, count in sorted(lines.items()):
        print(f"{count:7,}  {folder}")
    print(f"{sum(lines.values()):7,}  in all")
    for fault in faults:
        print("broken:", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
