import importlib.util
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="the notebooks extra is not installed")
nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("notebook_runner", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", sorted(FOLDER.glob("[0-9][0-9]_*.py")), ids=lambda file: file.stem)
def test_stored_notebooks_are_their_scripts_and_reveal_nothing(run, script):
    stored = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert run.differences(jupytext.read(script), stored) == []
    assert run.revelations(stored) == []
    nbformat.validate(stored)


def notebook(*sources, count: int | None = 1):
    cells = [nbformat.v4.new_code_cell(source, execution_count=count) for source in sources]
    return nbformat.v4.new_notebook(cells=cells)


def test_differences_are_named(run):
    assert run.differences(notebook("a"), notebook("a")) == []
    assert run.differences(notebook("a"), notebook("a", "b")) == ["the .py has 1 cells, the .ipynb 2"]
    assert "cell 2 of the .ipynb is not that of the .py" in run.differences(notebook("a", "b"), notebook("a", "c"))[0]
    assert run.differences(notebook("a"), notebook("a", count=None)) == [
        "cell 1 of the .ipynb was stored without being run"
    ]


@pytest.mark.parametrize("secret", [str(FOLDER.parent / "x"), "made 2024-01-02 03:04:05"])
def test_outputs_that_reveal_the_machine_are_found(run, secret):
    shown = notebook("a")
    assert run.revelations(shown) == []
    shown.cells[0].outputs = [nbformat.v4.new_output("stream", text=f"see {secret}")]
    assert len(run.revelations(shown)) >= 1


def test_unknown_names_and_lonely_notebooks_are_refused(run, tmp_path):
    with pytest.raises(SystemExit, match="no notebook 99_absent"):
        run.pairs(["99_absent"])
    (tmp_path / "01_lonely.ipynb").write_text("{}")
    with pytest.raises(SystemExit, match=r"no \.py for the notebooks 01_lonely"):
        run.pairs([], tmp_path)


def test_a_pair_is_written_and_then_passes(run, tmp_path):
    script = tmp_path / "01_sum.py"
    script.write_text("# %%\nimport dots_jax.config\n\nprint(1 + 1)\n")
    assert run.check(script, write=False) == ["there is no 01_sum.ipynb; make it with --write"]
    assert run.check(script, write=True) == []
    stored = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    assert stored.cells[0].outputs[0].text == "2\n"
    assert run.differences(jupytext.read(script), stored) == []


def test_a_cell_that_raises_fails_and_stores_nothing(run, tmp_path):
    script = tmp_path / "01_broken.py"
    script.write_text("# %%\n1 / 0\n")
    found = run.check(script, write=True)
    assert len(found) == 1
    assert "ZeroDivisionError" in found[0]
    assert not script.with_suffix(".ipynb").exists()
