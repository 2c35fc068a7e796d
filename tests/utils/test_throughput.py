"""Rates of tokens, with a clock of the test's own."""

import pytest

from nanovllm.utils import throughput
from nanovllm.utils.throughput import Throughput


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(throughput, "perf_counter", lambda: seconds[0])
    return seconds


def test_rates_are_those_of_the_last_full_window(clock: list[float]):
    counted = Throughput()
    clock[0] = 4.0
    assert not counted.add(8, 4)
    assert counted.rates() == (2.0, 1.0), "of the first window, which is not full"
    clock[0] = 5.0
    assert counted.add(12, 1)
    clock[0] = 7.0
    assert not counted.add(100, 100)
    assert counted.rates() == (4.0, 1.0)
    assert counted.num_generated_tokens == 105


def test_tokens_of_a_step_that_is_longer_than_a_window(clock: list[float]):
    """A step is launched, and only later are its tokens counted."""
    counted = Throughput()
    clock[0] = 10.0
    assert not counted.add(0, 0)
    assert counted.add(200, 10)
    clock[0] = 11.0
    assert not counted.add(0, 0)
    assert counted.rates() == (20.0, 1.0)
