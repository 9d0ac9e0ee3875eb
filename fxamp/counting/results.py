"""What a measuring command found, as a file: the numbers, the command, the machine, the versions, the day.

    record = results.make("tools/count", ["gpt2_small"], data, seconds)
    results.save(record, Path("docs/results/count.json"))

The README's tables are made from these files (`tools/tables`).
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

FOLDER = Path("docs/results")
_WITH_MODELS = ("torchvision", "transformers")


def add_save(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a command `--save [FILE]`; without FILE it is docs/results/NAME.json."""
    where = FOLDER / f"{name}.json"
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=where,
        metavar="FILE",
        help=f"write the numbers there; without FILE: {where}",
    )


def make(tool: str, arguments: Sequence[str], data: Any, seconds: float, device: str = "cpu") -> dict[str, Any]:
    """A record of one run.

    Args:
        tool: as one types it: "tools/count".
        arguments: what followed; `--save` and its file are left out.
        data: what JSON can hold.
        seconds: how long it took.
        device: "cpu" or "cuda": whose name is the machine's.
    """
    return {
        "command": " ".join([tool, *map(shlex.quote, _without_save(arguments))]),
        "machine": machine(device),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "data": data,
    }


def save(record: dict[str, Any], path: Path) -> None:
    """Write a record; a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, path)


def why_not_writable(path: Path) -> str:
    """What is in the way of writing a file, found before anything is measured; "" where nothing is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            is_new = file.tell() == 0
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def load(path: Path) -> dict[str, Any] | None:
    """The record in a file, None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def machine(device: str = "cpu") -> str:
    """machine() == "CPU with AVX512, 2 cores"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Of what decides the numbers: models of a library are other ones in its next version."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found |= {name: str(sys.modules[name].__version__) for name in _WITH_MODELS if name in sys.modules}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    return found


def _without_save(arguments: Sequence[str]) -> list[str]:
    """`--save` says where the record went, not what was measured."""
    kept: list[str] = []
    skips_file = False
    for argument in arguments:
        if argument == "--save":
            skips_file = True
        elif not (skips_file and argument.endswith(".json")):
            kept.append(argument)
            skips_file = False
    return kept


def as_table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> str:
    """A table in Markdown; numbers stand as they are given."""
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
