"""Options of torch.compile: its modes, plus combo kernels where there is a GPU."""

import pytest
import torch

from saccade.inference.compile import COMBO_KERNELS, compile_options


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_compile_options_without_gpu_are_the_mode(mode, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compile_options(mode) == {"mode": mode}


def test_compile_options_with_gpu_add_combo_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compile_options() == {"options": COMBO_KERNELS}
    assert compile_options("reduce-overhead") == {"options": {"triton.cudagraphs": True} | COMBO_KERNELS}
    model = torch.compile(torch.nn.Linear(2, 3), **compile_options("reduce-overhead"))  # torch refuses unknown options
    assert isinstance(model, torch.nn.Module)


def test_compile_options_refuse_an_unknown_mode(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Exception, match="mode"):
        compile_options("fastest")


def test_compile_options_fall_back_without_combo_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("saccade.inference.compile.COMBO_KERNELS", {"an_unknown_option": True})
    assert compile_options("reduce-overhead") == {"mode": "reduce-overhead"}
