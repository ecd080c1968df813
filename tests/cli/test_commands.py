import subprocess
import sys

import pytest

from dots_jax.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    assert main([command.replace("_", "-"), "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_no_command_and_unknown_command_are_one_line(capsys):
    for arguments in ([], ["frobnicate"]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("dots-jax: error: ")
        assert error.count("\n") == 1


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "dots_jax", "decode", "--layers", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
