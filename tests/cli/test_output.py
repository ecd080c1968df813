"""What a command does when its output cannot be JSON, or nobody takes it."""

import json
import subprocess
import sys

import pytest

from dots_jax import cli
from dots_jax.cli.output import json_text

LIST = [sys.executable, "-m", "dots_jax", "bench", "--list"]


def test_json_stays_json_whatever_was_measured():
    def refuse(name):
        raise AssertionError(name)

    value = {"a": [1.5, float("nan"), (float("inf"), -float("inf"), True, None)], "b": "nan"}
    got = json.loads(json_text(value), parse_constant=refuse)
    assert got == {"a": [1.5, None, [None, None, True, None]], "b": "nan"}


def test_a_reader_that_leaves_early_is_no_traceback():
    with subprocess.Popen(LIST, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 141


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(LIST, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "dots-jax: error: the output could not be written: No space left on device\n"


@pytest.mark.parametrize("place", ["build_parser", "check_platform"])
def test_an_interrupt_is_one_word_however_early_it_comes(monkeypatch, capsys, place):
    def interrupt():
        raise KeyboardInterrupt  # no signal: a process started in the background ignores SIGINT

    monkeypatch.setattr(cli, place, interrupt)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
