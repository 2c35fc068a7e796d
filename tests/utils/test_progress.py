"""Bars that show up where work takes long, and give way to log lines."""

import io
import logging
from functools import partial

import pytest
from tqdm import tqdm

from nanovllm.utils import progress
from nanovllm.utils.progress import closing_bar, slices


class Clock:
    """Each item of a portion takes ``pace`` seconds."""

    def __init__(self, pace: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pace = 100.0, pace
        monkeypatch.setattr(progress, "perf_counter", lambda: self.now)

    def run(self, count: int, size: int, bars: list[tqdm]) -> list[int]:
        """The bar's count before each portion; -1 without a bar."""

        def make(**options: object) -> tqdm:
            bars.append(tqdm(**options, file=io.StringIO()))
            return bars[-1]

        seen, items = [], []
        for portion in slices(count, size, make, "Tokenizing"):
            seen.append(int(bars[-1].n) if bars else -1)
            items += range(count)[portion]
            self.now += self.pace * len(range(count)[portion])
        assert items == list(range(count))
        return seen


def test_a_bar_of_slow_work_moves_from_its_first_portions_on(monkeypatch):
    bars: list[tqdm] = []
    assert Clock(0.002, monkeypatch).run(1000, 100, bars) == [-1, *range(100, 1000, 100)]
    assert (bars[0].total, bars[0].n, bars[0].desc) == (1000, 1000, "Tokenizing")
    assert bars[0].disable, "closed"


def test_quick_work_has_no_bar(monkeypatch):
    bars: list[tqdm] = []
    assert set(Clock(0.0005, monkeypatch).run(1000, 100, bars)) == {-1}
    assert Clock(1, monkeypatch).run(0, 100, bars) == []
    assert not bars


def test_a_bar_is_closed_where_work_ends_early(monkeypatch):
    clock, bars = Clock(1, monkeypatch), []
    make = partial(tqdm, file=io.StringIO())
    work = slices(1000, 100, lambda **options: bars.append(make(**options)) or bars[0], "x")
    for _ in work:
        clock.now += 10
        if bars:
            break
    work.close()
    assert bars[0].disable


def test_a_log_line_has_its_line_to_itself():
    stream, logger = io.StringIO(), logging.getLogger("nanovllm")
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        with closing_bar(tqdm(total=9, file=stream, mininterval=0, ncols=30)) as bar:
            bar.update(4)
            logger.info("halfway")
            bar.update(5)
        logger.info("after")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert not logger.filters
    printed = [line.split("\r")[-1] for line in stream.getvalue().split("\n")]
    assert printed[0] == "halfway" and printed[2] == "after"
    assert "9/9" in printed[1]
