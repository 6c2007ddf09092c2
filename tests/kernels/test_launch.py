"""The short road to a kernel: what was compiled is found again exactly when Triton would find the same."""

import pytest
import torch

from saccade.kernels import HAS_TRITON, learns
from saccade.kernels.sizes import parts, power_of_2

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, so there is nothing to start")


class Compiled:
    """What a Triton answers that names nothing of what it compiled."""

    def __init__(self, calls: list):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("short", grid, arguments))


class Named(Compiled):
    """And one that does: `run` takes grid, stream, function, its description, hooks, arguments."""

    function, packed_metadata = 42, (1, 2)

    def run(self, x, y, z, stream, *arguments):
        self.calls.append(("stream", stream, (x, y, z), *arguments))


class CudaLauncher:
    """Triton 3.6's, behind `run`."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, calls: list):
        self.calls = calls

    def launch(self, x, y, z, stream, *arguments):
        self.calls.append(("launcher", stream, (x, y, z), *arguments))

    def __call__(self, x, y, z, stream, *arguments):
        self.calls.append(("stream", stream, (x, y, z), *arguments))


class Kernel:
    """Stands in for a compiled-on-demand kernel: x_pointer, count, WIDE."""

    arg_names = ("x_pointer", "count", "WIDE")

    def __init__(self, answer=Compiled):
        self.answer, self.calls = answer, []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.calls.append(("long", grid, arguments[1:], constants))
            return self.answer(self.calls)

        return run


@pytest.fixture
def make(monkeypatch):
    from saccade.kernels import launch

    monkeypatch.setattr(launch.triton, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "_current_device", lambda: -1)  # what a tensor of the CPU calls its device
    monkeypatch.setattr(launch, "_current_stream", lambda device: 77)
    return launch.Launch


def roads(kernel: Kernel) -> list[str]:
    return [call[0] for call in kernel.calls]


@needs_triton
def test_second_call_is_short_and_hands_everything_on(make):
    kernel, x = Kernel(), torch.zeros(32)
    start = make(kernel, (5, 2), 7, WIDE=64, num_warps=4)
    start(x)
    start(x)
    assert kernel.calls == [
        ("long", (5, 2), (7,), dict(WIDE=64, num_warps=4)),
        ("short", (5, 2, 1), (x.data_ptr(), 7, 64)),
    ]


@needs_triton
def test_the_stream_is_the_one_in_use_at_the_call(make, monkeypatch):
    from saccade.kernels import launch

    kernel, x, y = Kernel(Named), torch.zeros(32), torch.zeros(32)
    start = make(kernel, (5,), 7, WIDE=64)
    for tensor, stream in ((x, 1), (x, 2), (y, 3)):
        monkeypatch.setattr(launch, "_current_stream", lambda device, stream=stream: stream)
        start(tensor)
    silent = (42, (1, 2), None, None, None)
    assert kernel.calls[1:] == [
        ("stream", 2, (5, 1, 1), *silent, x.data_ptr(), 7, 64),
        ("stream", 3, (5, 1, 1), *silent, y.data_ptr(), 7, 64),
    ]


@needs_triton
@pytest.mark.parametrize(
    ("change", "road"),
    [
        ({}, "launcher"),
        ({"global_scratch_size": 16}, "stream"),  # the launcher allocates that
        ({"profile_scratch_size": 16}, "stream"),
        ({"arg_annotations": ()}, "stream"),  # later Tritons take arguments otherwise
    ],
)
def test_the_launcher_is_called_itself_only_where_it_has_nothing_else_to_do(make, monkeypatch, change, road):
    for name, value in change.items():
        monkeypatch.setattr(CudaLauncher, name, value, raising=False)
    monkeypatch.setattr(Named, "run", property(lambda self: CudaLauncher(self.calls)))
    kernel, x = Kernel(Named), torch.zeros(32)
    start = make(kernel, (5,), 7, WIDE=64)
    start(x)
    start(x)
    assert roads(kernel) == ["long", road]
    assert kernel.calls[1][-3:] == (x.data_ptr(), 7, 64)


@needs_triton
def test_another_type_is_compiled_by_itself(make):
    kernel = Kernel()
    start = make(kernel, (5,), 7, WIDE=64)
    for dtype in (torch.float32, torch.float16, torch.float32, torch.float16):
        start(torch.zeros(32, dtype=dtype))
    assert roads(kernel) == ["long", "long", "short", "short"]


@needs_triton
def test_a_tensor_on_another_device_goes_where_triton_looks_at_it(make):
    """Triton says no to it; the short road would hand the kernel an address that is not there."""
    kernel, x = Kernel(), torch.zeros(32)
    kernel.arg_names = ("x_pointer", "y_pointer", "count", "WIDE")
    start = make(kernel, (5,), 7, WIDE=64)
    for other in (x, x, torch.zeros(32, device="meta"), x):
        start(x, other)
    assert roads(kernel)[:3] == ["long", "short", "long"]
    assert roads(kernel)[3] == "short"


@needs_triton
def test_an_unaligned_pointer_never_takes_the_short_road(make):
    kernel, whole = Kernel(), torch.zeros(33)
    start = make(kernel, (1,), 7, WIDE=64)
    assert whole.data_ptr() % 16 == 0
    for x in (whole, whole[1:], whole[1:], whole):
        start(x)
    assert roads(kernel) == ["long", "long", "long", "short"]


@needs_triton
def test_another_device_is_gone_to(make, monkeypatch):
    from saccade.kernels import launch

    here = [3]
    monkeypatch.setattr(launch, "_current_device", lambda: here[0])

    class there:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            here[0] = self.device

        def __exit__(self, *_):
            here[0] = 3

    monkeypatch.setattr(torch.cuda, "device", there)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    kernel = Kernel(Named)
    monkeypatch.setattr(launch, "_current_stream", lambda device: (device, here[0]))
    start = make(kernel, (1,), 7, WIDE=64)
    for _ in range(2):
        start(torch.zeros(32))
    assert roads(kernel) == ["long", "stream"]
    assert kernel.calls[1][1] == (1, 1)


@needs_triton
def test_who_listens_to_launches_hears_all_of_them(make, monkeypatch):
    from triton import knobs

    kernel, x = Kernel(), torch.zeros(32)
    start = make(kernel, (1,), 7, WIDE=64)
    start(x)
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    start(x)
    monkeypatch.undo()
    assert roads(kernel) == ["long", "long"]


def test_plans_are_kept_by_sizes_and_their_number_is_bounded():
    from saccade.kernels import launch

    made = []

    @launch.planned
    def plan(rows: int, exact: bool) -> int:
        made.append(rows)
        return rows

    assert [plan(rows, True) for rows in (3, 5, 3)] == [3, 5, 3]
    assert made == [3, 5]
    for rows in range(2 * launch.MOST):
        plan(rows, False)
    assert launch._plans[-1].cache_info().currsize <= launch.MOST
    launch.forget_plans()
    plan(3, True)
    assert made[-1] == 3
    launch._plans.pop()


def test_a_compiler_s_plans_are_its_own():
    from saccade.kernels import launch

    seen = []
    plan = launch.planned(lambda size: seen.append(size))
    launch.traced(lambda: plan([8]))()  # a list cannot be looked up, nor can a symbol
    assert seen == [[8]]
    assert not launch._here.traced
    launch._plans.pop()


def test_sizes_are_triton_s():
    triton = pytest.importorskip("triton")
    for number in range(1, 300):
        assert power_of_2(number) == triton.next_power_of_2(number)
        assert parts(number, 16) == triton.cdiv(number, 16)


def test_autograd_is_asked_for_only_where_something_learns():
    fixed, free = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert learns(fixed, free)
    assert not learns(fixed, None)
    with torch.no_grad():
        assert not learns(free)
