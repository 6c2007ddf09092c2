"""Progress by steps and by time."""

import math
from itertools import pairwise

import pytest

from saccade.engine.clock import WARMUP_STEPS, Clock


def test_progress_counts_steps_without_limit():
    clock = Clock(200)
    for _ in range(50):
        clock.tick()
    assert (clock.progress, clock.position, clock.done()) == (0.25, 50, False)


@pytest.mark.parametrize("step_seconds", [0.05, 0.4, 3.0])
def test_progress_reaches_one_at_time_limit(step_seconds):
    """Fast or slow, with a minute of compilation and pauses for validation."""
    clock, now, progress = Clock(10**6, max_minutes=10, now=0.0), 60.0, [0.0]
    while not clock.done(now):
        now += step_seconds
        clock.tick(now)
        progress.append(clock.progress)
        if clock.steps % 40 == 0:
            clock.pause()
            now += 5.0
    jumps = [b - a for a, b in pairwise(progress)]
    assert min(jumps) >= 0
    assert progress[WARMUP_STEPS + 1] < 0.02, "compilation must not use up the warm-up"
    assert max(jumps[:-8]) < 0.05
    assert progress[-1] > 0.95
    assert 600 <= now < 600 + 5 + 2 * step_seconds


def test_generous_limit_changes_nothing():
    limited, free = Clock(100, max_minutes=1000, now=0.0), Clock(100, now=0.0)
    for i in range(100):
        limited.tick(0.1 * i)
        free.tick(0.1 * i)
    assert limited.progress == free.progress == 1.0
    assert math.isclose(limited.position, free.position)


def test_state_dict_round_trip():
    clock = Clock(100, max_minutes=1, now=0.0)
    for i in range(20):
        clock.tick(0.1 * i)
    state_dict = clock.state_dict()
    later = Clock(100, max_minutes=1)
    later.load_state_dict(state_dict)
    assert (later.steps, later.progress) == (20, clock.progress)
    assert later.elapsed() >= state_dict["seconds"]


def test_throughput_excludes_warmup_and_validation():
    clock, now = Clock(1000, now=0.0), 0.0
    for step in range(1, 101):
        now += 20.0 if step <= WARMUP_STEPS else 0.5
        clock.tick(now)
        if step == 60:
            clock.pause()
            now += 300.0
    assert clock.images_per_second(32) == pytest.approx(64.0)
    assert clock.seconds_left() == pytest.approx(450.0)


def test_expired_run_takes_one_step():
    clock = Clock(100, max_minutes=1, now=0.0)
    assert not clock.done(now=120.0)
    clock.tick(now=121.0)
    assert clock.done(now=121.0)


def test_processes_adopt_time_of_rank_0():
    first, other = Clock(100, max_minutes=1, now=0.0), Clock(100, max_minutes=1)
    first.tick(1.0)
    other.tick()
    first.progress = 0.5
    other.set_time_state(first.time_state())
    assert (other.progress, other.done()) == (0.5, True)  # the limit of `first`, started at 0, is over
