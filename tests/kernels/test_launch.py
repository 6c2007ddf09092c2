"""The short road to a kernel: what was compiled is found again exactly when Triton would find the same."""

import pytest
import torch

from saccade.kernels import HAS_TRITON, learns

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is nothing to start")


class Compiled:
    def __init__(self, calls: list):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("short", grid, arguments[1:]))


class Kernel:
    """Stands in for a compiled-on-demand kernel: x_pointer, count, WIDE."""

    arg_names = ("x_pointer", "count", "WIDE")

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.calls.append(("long", grid, arguments[1:]))
            return Compiled(self.calls)

        return run


@pytest.fixture
def kernel(monkeypatch):
    from saccade.kernels import launch

    monkeypatch.setattr(launch, "_ready", {})
    monkeypatch.setattr(launch.triton, "JITFunction", Kernel)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a tensor of the CPU calls its device
    return Kernel()


def roads(kernel: Kernel) -> list[str]:
    return [call[0] for call in kernel.calls]


def test_second_call_is_short_and_hands_everything_on(kernel):
    from saccade.kernels.launch import start

    x = torch.zeros(32)
    for _ in range(2):
        start(kernel, (5, 2), x, 7, WIDE=64, num_warps=4)
    assert kernel.calls == [("long", (5, 2), (7,)), ("short", (5, 2, 1), (7, 64))]


@pytest.mark.parametrize(
    ("x", "count", "constants"),
    [
        (torch.zeros(32, dtype=torch.float16), 7, dict(WIDE=64, num_warps=4)),
        (torch.zeros(32), 16, dict(WIDE=64, num_warps=4)),  # divisible: Triton compiles for that
        (torch.zeros(32), 1, dict(WIDE=64, num_warps=4)),  # one is a constant to Triton
        (torch.zeros(32), 7, dict(WIDE=32, num_warps=4)),
        (torch.zeros(32), 7, dict(WIDE=64, num_warps=8)),
    ],
)
def test_another_kind_of_call_is_compiled_by_itself(kernel, x, count, constants):
    from saccade.kernels.launch import start

    start(kernel, (5,), torch.zeros(32), 7, WIDE=64, num_warps=4)
    start(kernel, (5,), x, count, **constants)
    assert roads(kernel) == ["long", "long"]


def test_an_unaligned_pointer_never_takes_the_short_road(kernel):
    from saccade.kernels.launch import start

    whole = torch.zeros(33)
    assert whole.data_ptr() % 16 == 0
    for x in (whole, whole[1:], whole[1:], whole):
        start(kernel, (1,), x, 7, WIDE=64)
    assert roads(kernel) == ["long", "long", "long", "short"]


def test_the_store_is_bounded(kernel, monkeypatch):
    from saccade.kernels import launch

    monkeypatch.setattr(launch, "MOST", 3)
    for count in range(20):
        launch.start(kernel, (1,), torch.zeros(4), count, WIDE=64)
    assert len(launch._ready) <= 3


def test_autograd_is_asked_for_only_where_something_learns():
    fixed, free = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert learns(fixed, free)
    assert not learns(fixed, None)
    with torch.no_grad():
        assert not learns(free)
