"""Writes the generated reference pages: docs/options.md from Config. `--check` only says what differs."""

from __future__ import annotations

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


PAGES = {"docs/options.md": options}


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
