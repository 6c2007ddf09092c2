"""Progress of a run: by optimizer steps or, with a time limit, by elapsed time."""

import time
from typing import Any

WARMUP_STEPS = 10  # until compilation and cold caches no longer distort the measured step time


class Clock:
    """Count optimizer steps; `progress` goes from 0 to 1 over the run and drives every schedule.

    Without a limit, progress is steps / total_steps: the same on every machine. With `max_minutes`, each step advances
    it by its fraction of the remaining time, at the step time measured so far. The learning rate therefore reaches its
    final value when the time is over, however long compilation or pauses took, and never jumps.
    """

    def __init__(self, total_steps: int, max_minutes: float | None = None, now: float | None = None):
        self.total_steps, self.limit = total_steps, None if max_minutes is None else 60 * max_minutes
        self.steps, self.progress = 0, 0.0
        self.stopped = False  # early
        self.started = time.monotonic() if now is None else now
        self.previous_seconds = 0.0  # elapsed before the run was resumed
        self.time_over: bool | None = None  # as decided by rank 0, with several processes
        self._warm: tuple[float, int] | None = None  # time and local step at the end of the warm-up
        self._local_steps = 0  # of this process since it started
        self._last_step: float | None = None  # its time; None after a pause
        self.train_seconds, self.train_steps = 0.0, 0  # of the warm-up until it ends, then without it and validation

    def elapsed(self, now: float | None = None) -> float:
        return self.previous_seconds + (time.monotonic() if now is None else now) - self.started

    def expired(self, now: float | None = None) -> bool:
        """Whether the time is over or the run was stopped early; never before the first step."""
        if self.stopped or not self.steps:
            return self.stopped
        if self.time_over is not None:
            return self.time_over
        return self.limit is not None and self.elapsed(now) >= self.limit

    def time_state(self) -> tuple[float, bool]:
        """Return this process's progress and whether its time is over."""
        return self.progress, self.limit is not None and self.elapsed() >= self.limit

    def set_time_state(self, state: tuple[float, bool]) -> None:
        """Adopt the `time_state` of rank 0."""
        self.progress, self.time_over = state

    def done(self, now: float | None = None) -> bool:
        return self.steps >= self.total_steps or self.expired(now)

    def tick(self, now: float | None = None) -> None:
        """Count one optimizer step."""
        now = time.monotonic() if now is None else now
        self.steps += 1
        self._local_steps += 1
        if self._last_step is not None:
            self.train_seconds, self.train_steps = self.train_seconds + now - self._last_step, self.train_steps + 1
        if self._warm is None and self._local_steps >= WARMUP_STEPS:
            self._warm, self.train_seconds, self.train_steps = (now, self._local_steps), 0.0, 0
        self._last_step = now
        by_steps = self.steps / self.total_steps
        self.progress = max(by_steps, self._progress_by_time(now)) if self.limit else by_steps

    def pause(self) -> None:
        """Exclude the time until the next step from the training time."""
        self._last_step = None

    def _progress_by_time(self, now: float) -> float:
        assert self.limit is not None
        if self._warm is None or self._local_steps == self._warm[1]:
            return self.progress
        step_time = (now - self._warm[0]) / (self._local_steps - self._warm[1])  # including validation
        left = self.limit - self.elapsed(now)
        return self.progress + (1 - self.progress) * min(1.0, step_time / max(left + step_time, 1e-9))

    @property
    def position(self) -> float:
        """Step whose learning rate applies next: `steps` without a limit, progress * total_steps with one."""
        return self.progress * self.total_steps if self.limit else self.steps

    def images_per_second(self, batch_size: int) -> float | None:
        return self.train_steps * batch_size / self.train_seconds if self._warm and self.train_steps else None

    def seconds_left(self) -> float:
        """Return the remaining time at the measured step time; 0 before the second step."""
        if self.limit is not None:
            return max(0.0, self.limit - self.elapsed())
        return (self.total_steps - self.steps) * self.train_seconds / max(1, self.train_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "progress": self.progress, "seconds": self.elapsed(), "stopped": self.stopped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.progress, self.stopped = state_dict["steps"], state_dict["progress"], state_dict["stopped"]
        if not self.limit:  # the run may have been extended
            self.progress = self.steps / self.total_steps
        self.previous_seconds = state_dict["seconds"]
