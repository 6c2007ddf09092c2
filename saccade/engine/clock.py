"""How far a run is: by updates done or, with a time limit, by the time they take."""

import time
from typing import Any

WARM = 10  # updates until compilation and caches no longer disturb the measured pace


class Clock:
    """Counts updates; `share` goes from 0 to 1 over the run and drives every schedule.

    Without a limit, share is updates done / updates planned: the same on every machine. With `max_minutes`, each
    update moves it by its part of the time that is left, at the pace measured so far. So the learning rate ends
    where it should when the time ends, whatever the machine, the compiler or a pause took, and never jumps.
    """

    def __init__(self, total: int, max_minutes: float | None = None, now: float | None = None):
        self.total, self.limit = total, None if max_minutes is None else 60 * max_minutes
        self.steps, self.share = 0, 0.0
        self.started = time.monotonic() if now is None else now
        self.earlier = 0.0  # seconds spent before a resume
        self.agreed: bool | None = None  # with several processes: whether the time is over, as the first one says
        self._warm: tuple[float, int] | None = None  # when this process was warm, and its updates by then
        self._here = 0  # updates of this process
        self._last: float | None = None
        self.busy_seconds, self.busy_steps = 0.0, 0  # training alone, warm, without validation

    def elapsed(self, now: float | None = None) -> float:
        return self.earlier + (time.monotonic() if now is None else now) - self.started

    def expired(self, now: float | None = None) -> bool:
        """Never before the first update: a run that took all its time to start has something to show."""
        if not self.steps:
            return False
        if self.agreed is not None:
            return self.agreed
        return self.limit is not None and self.elapsed(now) >= self.limit

    def opinion(self) -> tuple[float, bool]:
        """How far this process thinks the run is, and whether its time is over."""
        return self.share, self.limit is not None and self.elapsed() >= self.limit

    def agree(self, opinion: tuple[float, bool]) -> None:
        """Take over the opinion of the process whose watch counts."""
        self.share, self.agreed = opinion

    def done(self, now: float | None = None) -> bool:
        return self.steps >= self.total or self.expired(now)

    def tick(self, now: float | None = None) -> None:
        """One update is done."""
        now = time.monotonic() if now is None else now
        self.steps += 1
        self._here += 1
        if self._warm is None and self._here >= WARM:
            self._warm = (now, self._here)
        elif self._warm is not None and self._last is not None:
            self.busy_seconds += now - self._last
            self.busy_steps += 1
        self._last = now
        self.share = max(self.steps / self.total, self._by_time(now)) if self.limit else self.steps / self.total

    def pause(self) -> None:
        """What comes before the next update is not training."""
        self._last = None

    def _by_time(self, now: float) -> float:
        assert self.limit is not None
        if self._warm is None or self._here == self._warm[1]:
            return self.share
        pace = (now - self._warm[0]) / (self._here - self._warm[1])  # seconds an update, validation included
        left = self.limit - self.elapsed(now)
        return self.share + (1 - self.share) * min(1.0, pace / max(left + pace, 1e-9))

    @property
    def position(self) -> float:
        """The update whose learning rate is due: exact without a limit, stretched or pressed with one."""
        return self.share * self.total if self.limit else self.steps

    def images_per_second(self, batch_size: int) -> float | None:
        return self.busy_steps * batch_size / self.busy_seconds if self.busy_steps else None

    def seconds_left(self) -> float:
        """Until the end, at the pace so far."""
        if self.limit is not None:
            return max(0.0, self.limit - self.elapsed())
        return (self.total - self.steps) * self.busy_seconds / max(1, self.busy_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "share": self.share, "seconds": self.elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.share, self.earlier = state["steps"], state["share"], state["seconds"]
