import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.utils import garbage
from nanovllm.utils.garbage import collect_all, collecting_new_objects_only


class Node:
    """A cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what conftest.py freezes, until the test ends."""
    monkeypatch.setattr(garbage, "_program_has_frozen", Event())
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def is_collected(node: list[Node]) -> bool:
    reference = weakref.ref(node.pop())
    gc.collect()
    return reference() is None


def test_only_new_objects_are_collected_until_the_end():
    old = [Node()]
    reference = weakref.ref(old[0])
    with pytest.raises(ZeroDivisionError), collecting_new_objects_only():
        assert not is_collected(old) and is_collected([Node()])
        raise ZeroDivisionError
    gc.collect()
    assert reference() is None and gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen():
    gc.freeze()
    count = gc.get_freeze_count()
    with collecting_new_objects_only():
        assert is_collected([Node()])
    assert gc.get_freeze_count() == pytest.approx(count, abs=100)
    gc.unfreeze()


def test_python_itself_may_have_frozen_some_objects(monkeypatch):
    """Python 3.12 does when it starts."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    old = [Node()]
    with collecting_new_objects_only():
        assert not is_collected(old)


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch):
    """Counting visits all of them, in each call of ``generate``."""
    counts, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    with collecting_new_objects_only(), collecting_new_objects_only():
        assert counts == [0]
    gc.freeze()
    for _ in range(3):
        with collecting_new_objects_only():
            pass
    assert len(counts) == 2 and counts[1] > 0
    gc.unfreeze()


def test_a_block_within_another_ends_nothing():
    with collecting_new_objects_only():
        with collecting_new_objects_only():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_old_objects_are_collected_if_asked_for():
    """An engine that is closed while another one generates is freed at once."""
    old = [Node()]
    reference = weakref.ref(old[0])
    with collecting_new_objects_only():
        assert not is_collected(old)
        collect_all()
        assert reference() is None


@pytest.mark.parametrize("part", ["prepare_all", "add_prepared", "run_step"])
def test_generate_collects_new_objects_only(part: str, model_path: Path, monkeypatch):
    """Also while it prepares requests: those of 2,048 prompts cause a full collection."""
    old, were_collected = [Node()], []
    with LLM(model_path, device="cpu", num_kvcache_blocks=4, max_num_seqs=1) as llm:
        owner = llm.preparer if part == "prepare_all" else llm
        run = getattr(owner, part)

        def run_and_collect(*args, **options):
            if old:
                were_collected.append(is_collected(old))
            return run(*args, **options)

        monkeypatch.setattr(owner, part, run_and_collect)
        llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert were_collected == [False]
