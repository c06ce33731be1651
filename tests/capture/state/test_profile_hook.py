"""The profile hook of a capture beside profilers that the user runs, and the stack below it."""

from __future__ import annotations

import cProfile
import logging
import os
import resource
import sys
import threading

import pytest
import torch

from fusejit import jit
from fusejit.capture.state.profile_hook import Hook, unobserved
from fusejit.runtime.frame_stack import roomy

SCALE = "FUSEJIT_TEST_HOOK"


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * float(os.environ[SCALE])


def called_after() -> None:
    """What a profiler that goes on behind a capture sees."""


class Seen(list):
    def __call__(self, frame, event, arg):
        if event == "call":
            self.append(frame.f_code.co_name)


def under_function() -> list[str]:
    seen = Seen()
    sys.setprofile(seen)
    run_profiled()
    sys.setprofile(None)
    return seen


def under_cprofile() -> list[str]:
    profiler = cProfile.Profile()
    profiler.enable()
    run_profiled()
    profiler.disable()
    return [getattr(entry.code, "co_name", "") for entry in profiler.getstats()]


def run_profiled() -> None:
    fn = jit(scaled, backend="eager", fullgraph=True)
    assert fn(torch.ones(2)).tolist() == [2.0, 2.0]
    os.environ[SCALE] = "3"
    assert fn(torch.ones(2)).tolist() == [3.0, 3.0]  # only the hook sees that the environment is read
    called_after()


@pytest.mark.parametrize("profiled", [under_function, under_cprofile])
def test_a_profiler_hides_no_read_and_goes_on(profiled, monkeypatch):
    monkeypatch.setenv(SCALE, "2")
    assert "called_after" in profiled()
    assert sys.getprofile() is None


def test_a_profiler_that_only_c_can_resume_is_said(monkeypatch, caplog):
    monkeypatch.setattr(sys, "getprofile", object)
    with caplog.at_level(logging.WARNING), Hook(Seen()):
        pass
    assert "ended the Python stacks of a running profiler" in caplog.text


def test_unobserved_suspends_only_the_captures_own_hook():
    seen, others = Seen(), Seen()
    with Hook(seen):
        with unobserved():
            called_after()
        assert "called_after" not in seen
        worker = threading.Thread(target=called_after)
        worker.start()
        worker.join()
        assert "called_after" not in seen
        called_after()
    assert seen.count("called_after") == 1
    sys.setprofile(others)
    with unobserved():
        called_after()
    sys.setprofile(None)
    assert "called_after" in others


def deep(depth: int, fn) -> None:
    fn() if depth == 0 else deep(depth - 1, fn)


def test_calls_below_a_roomy_one_map_no_memory():
    """Whatever the depth of the caller is; a plain function takes a page or more at each call where a chunk of the
    stack ends.
    """

    @roomy
    def calls() -> None:
        for _ in range(500):
            deep(3, called_after)

    def faults(depth: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        deep(depth, calls)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    calls()
    assert max(faults(depth) for depth in range(200)) < 250
