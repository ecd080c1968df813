import os
import subprocess
import sys

import pytest

import dots_jax
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


def test_says_its_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dots-jax {dots_jax.__version__}\n"


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "dots_jax", "decode", "--layers", "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("platform", ["nonsense", "cuda"])
def test_a_platform_that_is_not_here_is_one_line(platform):
    done = subprocess.run(
        [sys.executable, "-m", "dots_jax", "info"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    assert f"JAX_PLATFORMS='{platform}'" in done.stderr
    assert "Traceback" not in done.stderr
