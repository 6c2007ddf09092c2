"""Learning rates at given epochs, weight decay where it belongs, and time that is kept."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import saccade
from saccade.engine.clock import WARMUP_STEPS, Clock
from saccade.engine.recipe import Optimizer, RecipeError, Schedule, load_recipe
from saccade.engine.schedule import learning_rate, make_optimizer, make_schedule

STEPS = 100  # updates an epoch
RECIPES = Path(__file__).parents[2] / "recipes"


def rates(schedule: Schedule, lr: float, epochs: int, at: list[float]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    made = make_schedule(optimizer, schedule, epochs, STEPS)
    found = []
    for epoch in at:
        made.step_update(round(epoch * STEPS))
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_vt_default_decays_by_ten_every_thirty_epochs():
    """VT-51."""
    schedule = load_recipe(RECIPES / "imagenet/vt_resnet18.yaml").schedule
    found = rates(schedule, 0.1, 90, [0, 29.99, 30, 59.99, 60, 89])
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_vt_advanced_rises_then_falls_by_1_25_percent_an_epoch():
    """VT-53, VT-58."""
    schedule = load_recipe(RECIPES / "imagenet/vt_resnet18_advanced.yaml").schedule
    found = rates(schedule, 0.16, 400, [0, 2.5, 5, 6, 7, 105])
    assert found == pytest.approx([0.01, 0.085, 0.16, 0.158, 0.16 * 0.9875**2, 0.16 * 0.9875**100])


def test_cosine_with_warm_up():
    """SVIT-40, SVIT-43: 1e-6 to 1e-3 in 5 epochs, then the cosine of the whole run down to 1e-5."""
    schedule = load_recipe(RECIPES / "imagenet/svit_small.yaml").schedule
    found = rates(schedule, 1e-3, 300, [0, 2.5, 150, 300])
    assert found == pytest.approx([1e-6, 0.5 * (1e-6 + 1e-3), 1e-5 + 0.5 * (1e-3 - 1e-5), 1e-5])


def test_constant_and_fractions_of_epochs():
    assert rates(Schedule("constant", warmup_epochs=0), 5e-6, 30, [0, 15, 30]) == pytest.approx([5e-6] * 3)
    assert rates(Schedule(warmup_epochs=0.5, warmup_lr=0.0), 1.0, 10, [0.25])[0] == pytest.approx(0.5)


def test_the_rate_follows_the_batch_when_the_recipe_says_so():
    assert learning_rate(Optimizer(lr=5e-4, reference_batch=512), 1024) == 1e-3
    assert learning_rate(Optimizer(lr=5e-4), 1024) == 5e-4


def test_no_weight_decay_on_biases_and_norms():
    model = saccade.create_model("svit_nano", position="ape")
    groups = make_optimizer(model, Optimizer(weight_decay=0.05), 64).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim == 1 or name.endswith(".table")
        assert (id(parameter) in decayed) != exempt, name


def test_an_unknown_optimizer_is_a_clear_error():
    with pytest.raises(RecipeError, match="cannot create optimizer 'adamv'"):
        make_optimizer(torch.nn.Linear(2, 2), Optimizer(name="adamv"), 64)


def test_without_a_limit_share_counts_updates():
    clock = Clock(200)
    for _ in range(50):
        clock.tick()
    assert (clock.progress, clock.position, clock.done()) == (0.25, 50, False)


@pytest.mark.parametrize("step_seconds", [0.05, 0.4, 3.0])
def test_with_a_limit_the_schedule_ends_with_the_time(step_seconds):
    """Fast or slow, with a minute of compilation and pauses for validation: share reaches 1 as the time ends."""
    clock, now, shares = Clock(10**6, max_minutes=10, now=0.0), 60.0, [0.0]
    while not clock.done(now):
        now += step_seconds
        clock.tick(now)
        shares.append(clock.progress)
        if clock.steps % 40 == 0:
            clock.pause()
            now += 5.0
    jumps = [b - a for a, b in pairwise(shares)]
    assert min(jumps) >= 0
    assert shares[WARMUP_STEPS + 1] < 0.02, "compiling must not eat the warm-up"
    assert max(jumps[:-8]) < 0.05
    assert shares[-1] > 0.95
    assert 600 <= now < 600 + 5 + 2 * step_seconds


def test_a_limit_that_is_not_needed_changes_nothing():
    limited, free = Clock(100, max_minutes=1000, now=0.0), Clock(100, now=0.0)
    for i in range(100):
        limited.tick(0.1 * i)
        free.tick(0.1 * i)
    assert limited.progress == free.progress == 1.0
    assert math.isclose(limited.position, free.position)


def test_the_clock_goes_on_where_it_was():
    clock = Clock(100, max_minutes=1, now=0.0)
    for i in range(20):
        clock.tick(0.1 * i)
    state = clock.state_dict()
    later = Clock(100, max_minutes=1)
    later.load_state_dict(state)
    assert (later.steps, later.progress) == (20, clock.progress)
    assert later.elapsed() >= state["seconds"]


def test_throughput_leaves_out_the_warm_up_and_validation():
    clock, now = Clock(1000, now=0.0), 0.0
    for step in range(1, 101):
        now += 20.0 if step <= WARMUP_STEPS else 0.5
        clock.tick(now)
        if step == 60:
            clock.pause()
            now += 300.0
    assert clock.images_per_second(32) == pytest.approx(64.0)
    assert clock.seconds_left() == pytest.approx(450.0)


def test_a_run_whose_time_is_over_before_it_starts_makes_one_update():
    clock = Clock(100, max_minutes=1, now=0.0)
    assert not clock.done(now=120.0)
    clock.tick(now=121.0)
    assert clock.done(now=121.0)
