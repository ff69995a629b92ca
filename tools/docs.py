"""Writes the generated reference pages: docs/options.md from Config. `--check` only says what differs."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trine.flags import Field, fields  # noqa: E402


def options() -> str:
    """Every option as a table by group: flag, other names, meaning, default."""
    lines = [
        "# Options",
        "",
        "Made from `trine/config.py` by `make docs`. The same names, with or without dashes, work in a YAML file (`--config FILE`) and in Python (`LLM(model, max_num_seqs=8)`).",
    ]
    group = ""
    for field in fields():
        if field.group != group:
            group = field.group
            lines += [
                "",
                f"## {group.capitalize()}",
                "",
                "| option | also | meaning | default |",
                "|---|---|---|---|",
            ]
        lines.append(_row(field))
    return "\n".join(lines) + "\n"


def _row(field: Field) -> str:
    also = ", ".join(f"`{name}`" for name in field.alias)
    value = f" `{'` or `'.join(field.choices)}`" if field.choices else ""
    default = "" if field.default in (None, ()) else f"`{field.default}`"
    return f"| `{field.flag}` | {also} | {field.help}{';' + value if value else ''} | {default} |"


def models() -> str:
    """What can be run: families, checkpoint formats, the catalog. Asked of the code."""
    from trine import catalog
    from trine.loader.dequant import FORMULAS
    from trine.loader.gguf import ARCHITECTURES

    package = ROOT / "trine" / "models"
    lines = [
        "# Models",
        "",
        "Made by `make docs` from the files of `trine/models`; a family is the `model_type` of its config.",
        "",
        "| family | what | from GGUF |",
        "|---|---|---|",
    ]
    for file in sorted(package.glob("*.py")):
        if file.stem not in ("__init__", "decoder"):
            what = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
            lines.append(f"| `{file.stem}` | {what} | {'yes' if file.stem in ARCHITECTURES else 'no'} |")
    lines += [
        "",
        "Checkpoints: a folder with `config.json` and safetensors (one file or shards), or a `.gguf` file. GGUF tensors may be of the types "
        + ", ".join(sorted(FORMULAS))
        + ". Pickled weights and code inside a repository are never loaded.",
        "",
        "A model is named, in this order, by a folder or `.gguf` file, a name of the catalog, or a hub id `org/name`. The catalog:",
        "",
        "| name | what | license |",
        "|---|---|---|",
        *(f"| `{name}` | {entry.description} | {entry.license} |" for name, entry in catalog.MODELS.items()),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"docs/options.md": options, "docs/models.md": models}


def main() -> int:
    stale = [
        name
        for name, make in PAGES.items()
        if not (ROOT / name).exists() or (ROOT / name).read_text() != make()
    ]
    if "--check" in sys.argv:
        for name in stale:
            print(f"{name} is not what the code says: run make docs")
        return 1 if stale else 0
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())
    print(f"{len(PAGES)} pages, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
