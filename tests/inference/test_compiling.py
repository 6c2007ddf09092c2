"""What torch.compile is asked for: its own modes, and small steps together where there is a GPU."""

import pytest
import torch

from saccade.inference.compiling import TOGETHER, compiling


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_without_a_gpu_the_modes_are_torch_s(mode, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compiling(mode) == {"mode": mode}


def test_a_gpu_gets_small_steps_together(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiling() == {"options": TOGETHER}
    assert compiling("reduce-overhead") == {"options": {"triton.cudagraphs": True} | TOGETHER}
    model = torch.compile(torch.nn.Linear(2, 3), **compiling("reduce-overhead"))  # which refuses unknown options
    assert isinstance(model, torch.nn.Module)


def test_a_mode_that_torch_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Exception, match="mode"):
        compiling("fastest")


def test_a_pytorch_without_that_option_compiles_as_it_can(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("saccade.inference.compiling.TOGETHER", {"an_option_of_another_year": True})
    assert compiling("reduce-overhead") == {"mode": "reduce-overhead"}
