"""The programs in README.md and docs/ run as they stand, and the files these pages name exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = [
    pytest.param(program, id=f"{page.name}-{number}")
    for page in PAGES
    for number, program in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run(program, tmp_path):
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [(page.parent, target) for target in re.findall(r"\]\(([^):#]+)\)", text)]
    paths = [
        (ROOT, path) for path in re.findall(r"`((?:benchmarks|docs|dots_jax|notebooks|pallas_kernels)/[\w./-]+)`", text)
    ]
    assert [path for folder, path in links + paths if not (folder / path).exists()] == []
