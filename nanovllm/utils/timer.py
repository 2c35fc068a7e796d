"""Measures how long each part of a task takes."""

from time import perf_counter

import torch


class Timer:
    """Records the seconds of each part of a task on a device.

    Args:
        seconds: receives the seconds of each part, by the part's name.
        device: the device that the task runs on.
    """

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self._seconds = seconds
        self._device = device
        self._last = perf_counter()

    def __call__(self, part: str) -> None:
        """Waits for the GPU, then records the time since the last call as that of ``part``."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = perf_counter()
        self._seconds[part] = round(now - self._last, 3)
        self._last = now
