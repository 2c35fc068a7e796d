"""How long the parts of a task take."""

from time import perf_counter

import torch


class Timer:
    """Records the seconds of each part of a task on a device.

    Args:
        seconds: what it fills, by the parts' names.
    """

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self._seconds = seconds
        self._device = device
        self._last = perf_counter()

    def __call__(self, part: str) -> None:
        """The part since the last one has ended, once the GPU has finished it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = perf_counter()
        self._seconds[part] = round(now - self._last, 3)
        self._last = now
