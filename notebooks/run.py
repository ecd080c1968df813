"""Runs every notebook from a clean kernel: `python notebooks/run.py [--write] [NAME ...]`.

A notebook is a pair: `NN_name.py` (percent format; the one to edit) and `NN_name.ipynb` (the same cells with their
outputs). The check fails when a cell raises, when the pair's cells differ, when a code cell was never run before it was
stored, or when an output shows something of the machine it was made on. `--write` makes the .ipynb anew from the .py.
"""

import argparse
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parent
CELL_TIMEOUT_S = 300
_TIMESTAMP = re.compile(r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}")


def pairs(names: list[str], folder: Path = FOLDER) -> list[Path]:
    """The .py files of the notebooks, all or those whose name is given without its ending."""
    found = sorted(folder.glob("[0-9][0-9]_*.py"))
    lonely = {file.stem for file in folder.glob("*.ipynb")} - {file.stem for file in found}
    if lonely:
        raise SystemExit(f"no .py for the notebooks {', '.join(sorted(lonely))}")
    if unknown := set(names) - {file.stem for file in found}:
        raise SystemExit(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(f.stem for f in found)}")
    return [file for file in found if not names or file.stem in names]


def run(notebook: Any) -> None:
    """Runs all cells in a new kernel of this Python that imports the project from this folder's parent."""
    project = str(FOLDER.parent.resolve())
    paths = [project, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # no warnings about how the kernel is reached
    )
    client.execute(env=environment, cwd=str(FOLDER))


def differences(script: Any, stored: Any) -> list[str]:
    """How the cells of the .py and of the .ipynb differ, and which code cells were stored without having been run."""
    if len(script.cells) != len(stored.cells):
        return [f"the .py has {len(script.cells)} cells, the .ipynb {len(stored.cells)}"]
    found = []
    for number, (ours, theirs) in enumerate(zip(script.cells, stored.cells, strict=True), 1):
        if (ours.cell_type, ours.source) != (theirs.cell_type, theirs.source):
            found.append(f"cell {number} of the .ipynb is not that of the .py ({ours.source.splitlines()[:1]})")
        elif theirs.cell_type == "code" and theirs.execution_count is None:
            found.append(f"cell {number} of the .ipynb was stored without being run")
    return found


def revelations(notebook: Any) -> list[str]:
    """Outputs that name this machine's folders or host, or a time of day."""
    known = {str(FOLDER.parent.resolve()), str(Path.home()), sys.prefix, socket.gethostname()} - {"localhost"}
    secrets = {name for name in known if len(name) > 4}  # a shorter one would be found in ordinary words
    found = []
    for number, cell in enumerate(notebook.cells, 1):
        for text in _texts(cell.get("outputs", [])):
            found += [f"an output of cell {number} shows {secret!r}" for secret in secrets if secret in text]
            if stamp := _TIMESTAMP.search(text):
                found.append(f"an output of cell {number} shows the time {stamp[0]!r}")
    return found


def _texts(outputs: list[Any]) -> list[str]:
    data = [value for output in outputs for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return data + [output["text"] for output in outputs if "text" in output]


def tidy(notebook: Any) -> Any:
    """Leaves of the metadata only what a viewer needs, and numbers the cells in order."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = nbformat.from_dict({}), f"cell-{number}"
    return notebook


def check(file: Path, *, write: bool) -> list[str]:
    """What is wrong with one pair; with `write`, the .ipynb is stored if nothing is."""
    script, target = jupytext.read(file), file.with_suffix(".ipynb")
    if not write and not target.exists():
        return [f"there is no {target.name}; make it with --write"]
    found = [] if write else differences(script, nbformat.read(target, as_version=4))
    if not write:
        found += revelations(nbformat.read(target, as_version=4))
    try:
        run(script)
    except CellExecutionError as error:
        return [*found, str(error)]
    if write:
        found += revelations(script)
        if not found:
            nbformat.write(tidy(script), target)
    return found


def main() -> int:
    """Checks or writes the notebooks; 1 if anything is wrong with one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks, such as 01_first_decode (default: all)")
    parser.add_argument("--write", action="store_true", help="store the outputs in the .ipynb files")
    arguments = parser.parse_args()
    failed = False
    for file in pairs(arguments.names):
        found = check(file, write=arguments.write)
        failed |= bool(found)
        print(f"{file.stem}: {'FAILED' if found else 'stored' if arguments.write else 'passed'}")
        for line in found:
            print(f"  {line}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
