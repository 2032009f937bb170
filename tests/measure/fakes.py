"""A clock that goes on only when told to, and an asynchronous device that runs by it."""

from collections.abc import Callable, Iterable


class FakeClock:
    """Every reading costs `reading_s`; a step made by `step` takes the next of the planned times."""

    def __init__(self, reading_s: float = 0.0) -> None:
        self.now = 0.0
        self.reading_s = reading_s

    def __call__(self) -> float:
        self.now += self.reading_s
        return self.now

    def step(self, times_s: Iterable[float]) -> Callable[[], None]:
        times = iter(times_s)

        def step() -> None:
            self.now += next(times)

        return step


class FakeDevice:
    """Kernels queue up and run one after the other, while the host goes on: as a GPU does."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.idle_at = 0.0
        self.log: list[str] = []

    def launch(self, kernel_s: float, host_s: float = 0.0) -> None:
        self.log.append("launch")
        self.idle_at = max(self.idle_at, self.clock.now) + kernel_s
        self.clock.now += host_s

    def synchronize(self) -> None:
        self.log.append("wait")
        self.clock.now = max(self.clock.now, self.idle_at)

    def event(self) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    """What `torch.cuda.Event` promises: when the queue, as it was at `record`, had run."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.device.log.append("record")
        self.at = max(self.device.idle_at, self.device.clock.now)

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1e3 * (end.at - self.at)
