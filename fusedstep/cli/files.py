"""Where a result is left: tried before anything is timed, and written whenever there is another row."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer


class Files(NamedTuple):
    """The raw result under a name of the user's, and in a folder, with a picture and a report beside it."""

    raw: Path | None
    in_folder: Path | None

    @staticmethod
    def of(raw: Path | None, folder: Path | None, name: Sequence[str], facts: dict[str, Any]) -> Files:
        """Both are tried: a run that nothing can be left of is not begun."""
        if raw is not None:
            _try(raw.parent, "--json")
            if raw.is_dir():
                message = f"{raw} is a folder; name a file in it, such as {raw / 'result.json'}"
                raise typer.BadParameter(message, param_hint="--json")
        if folder is None:
            return Files(raw, None)
        _try(folder, "--output")
        first, *rest = name
        # a part gets a name of its own, or it would replace the whole
        words = (first, *([facts["device"].lower()] if rest else []), *rest)
        text = re.sub("[^A-Za-z0-9._=]+", "-", "-".join(filter(None, words))).strip("-")
        return Files(raw, folder / f"{text}.json")

    def write(self, result: dict[str, Any]) -> None:
        for path in filter(None, self):
            path.write_text(json.dumps(result, indent=1) + "\n")


def _try(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        message = f"nothing can be written into {folder}: {why}; use a folder of your own"
        raise typer.BadParameter(message, param_hint=option) from error
