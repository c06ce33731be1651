"""Knobs: values and names that are none are errors or warnings at once, with the choices; every stage can be dumped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusejit
from fusejit import config

ROOT = Path(__file__).parent.parent
WRONG = {
    "FUSEJIT_BACKEND": "bogus",
    "FUSEJIT_STRICT": "maybe",
    "FUSEJIT_DISABLE": "2",
    "FUSEJIT_DEBUG": "y",
    "FUSEJIT_DUMP": "fused,bogus",
    "FUSEJIT_SPECIALISATIONS": "many",
    "FUSEJIT_CHUNK_BYTES": "1e9",
    "FUSEJIT_WORKERS": "-1",
}


def imported(**variables):
    code = "import warnings; warnings.simplefilter('always'); import fusejit; print('imported')"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", **variables},
        cwd=ROOT,
    )


def test_every_knob_with_choices_or_a_number_is_tried():
    plain = [knob.variable for knob in config.KNOBS.values() if not isinstance(knob.default, str) or knob.choices]
    assert sorted(plain) == sorted(WRONG)


@pytest.mark.parametrize("variable", WRONG)
def test_a_wrong_value_raises_where_a_function_is_jitted(variable, monkeypatch):
    monkeypatch.setenv(variable, WRONG[variable])
    with pytest.raises(ValueError, match=variable) as raised:
        fusejit.jit(lambda x: x + 1)
    knob = next(knob for knob in config.KNOBS.values() if knob.variable == variable)
    for choice in knob.choices or (("1", "0") if isinstance(knob.default, bool) else ("whole number",)):
        assert choice in str(raised.value)


@pytest.mark.parametrize(
    ("variable", "text"), [("FUSEJIT_STRICT", "On"), ("FUSEJIT_DUMP", " backward.fused, source"), ("FUSEJIT_DEBUG", "")]
)
def test_right_values(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    config.check_values()


def test_import_names_the_error_and_misspelt_variables():
    wrong = imported(FUSEJIT_BACKEND="tritn")
    assert (
        wrong.returncode == 1 and "FUSEJIT_BACKEND='tritn': choose one of auto, triton" in wrong.stderr.splitlines()[-1]
    )
    misspelt = imported(FUSEJIT_BACKND="eager", FUSEJIT_ZZZ="1")
    assert misspelt.stdout == "imported\n" and misspelt.stderr.count("UserWarning") == 2
    assert "FUSEJIT_BACKND is no knob of fusejit: did you mean FUSEJIT_BACKEND?" in misspelt.stderr


@pytest.mark.parametrize("stage", config.STAGES)
def test_every_stage_is_printed(stage, monkeypatch, capsys):
    monkeypatch.setenv("FUSEJIT_DUMP", stage)
    x = torch.randn(4, 8, requires_grad=True)
    fusejit.jit(lambda x: x.softmax(-1) + 1, backend="interpret")(x).sum().backward()
    printed = capsys.readouterr().err
    assert f"# {stage}" in printed or f".{stage}\n" in printed
