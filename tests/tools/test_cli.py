"""The `fusejit` command, run as a user does: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusejit.tools.cli import main

ROOT = Path(__file__).parents[2]
SAMPLE = """
import torch

def scaled(x, y):
    return (x * 2 + y).relu()

def norm(x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:])

example_args = {"norm": lambda: torch.randn(16, 256)}
scaled.example_args = (torch.randn(64, 128), torch.randn(128))
bad = 3
"""


ROWS = [("bias_gelu", "forward"), ("bias_gelu", "both"), ("adamw", "forward")]


@pytest.fixture
def sample(tmp_path):
    """A folder with a module that a user might have."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    return tmp_path


@pytest.fixture
def fusejit_command(sample):
    def run(*arguments):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-m", "fusejit", *arguments],
            capture_output=True,
            text=True,
            cwd=sample,
            env=environment,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.mark.full
def test_version_and_usage(fusejit_command):
    done = fusejit_command("--version")
    assert done.returncode == 0 and done.stdout.startswith("fusejit ")
    assert fusejit_command().returncode == 2
    assert fusejit_command("compile").returncode == 2


@pytest.mark.full
@pytest.mark.parametrize("function", ["sample:scaled", "sample.py:scaled", "sample:norm"])
def test_compile(fusejit_command, function, tmp_path):
    done = fusejit_command("compile", function, "--target", "sm_90", "--output", "out")
    assert done.returncode == 0, done.stderr
    header, line = done.stdout.splitlines()
    assert header.split() == ["kernel", "regs", "spills", "shared", "16-byte"]
    name, regs, spills, _, wide = line.split()
    assert int(regs) > 0 and spills == "0" and int(wide) > 0
    assert ".target sm_90" in (tmp_path / "out" / f"{name}.ptx").read_text()
    assert (tmp_path / "out" / f"{name}.cubin").stat().st_size > 0


def test_explain_with_arguments_on_the_command_line(fusejit_command):
    done = fusejit_command("explain", "sample:scaled", "--args", "torch.randn(8, 16), torch.randn(8, 16)", "--source")
    assert done.returncode == 0, done.stderr
    assert "@triton.jit" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("explain", "nothing:f"), "no module 'nothing'"),
        (("explain", "sample:nothing"), "has no nothing"),
        (("explain", "sample:bad"), "not a function"),
        (("explain", "nothing"), "the blocks are"),
        (("explain", "sample:torch.relu"), "--args"),
        (("explain", "sample:scaled", "--args", "nonsense("), "--args"),
        (("bench", "nothing"), "no block named nothing"),
        (("explain", "sample:scaled", "--args", "torch.randn(3)"), "missing a required argument: 'y'"),
        (("compile", "sample:norm", "--args", "1, 2, 3"), "too many positional arguments"),
        (("explain", "sample:norm", "--args", "3"), "'int' object has no attribute 'shape'"),
        (("compile", "sample:norm", "--args", "torch.randn(2, 2)[5]"), "IndexError"),
        (("explain", "softmax", "--args", "3"), "is no MODULE:FUNCTION"),
        (("explain", "layer_norm", "--args", "3"), "leave --args out"),
    ],
)
def test_bad_command_lines_say_what_to_write(sample, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(sample)
    monkeypatch.syspath_prepend(str(sample))
    monkeypatch.delitem(sys.modules, "sample", raising=False)
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("compile", "layer_norm", "--target", "foo"), "choose one of sm_"),
        (("compile", "layer_norm", "--target", "90"), "choose one of sm_"),
        (("compile", "layer_norm", "--output", "sample.py"), "is no folder"),
        (("bench", "--json", "nowhere/rows.json"), "cannot be written"),
        (("bench", "--json", "."), "cannot be written"),
    ],
)
def test_bad_options_end_before_the_work(sample, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(sample)
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fusejit ") and says in last


@pytest.mark.full
def test_bench_writes_json(fusejit_command, tmp_path):
    done = fusejit_command("bench", "bias_gelu", "adamw", "--json", "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stderr  # no progress line without a terminal
    result = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["block"], row["pass"]) for row in result["rows"]] == ROWS
    assert all(row["right"] for row in result["rows"])
    assert {"torch", "python"} <= set(result["versions"])
