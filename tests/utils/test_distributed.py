"""The store in which ranks leave word for each other."""

import shutil
import threading
from pathlib import Path

import pytest

from nanovllm.utils.distributed import close_store, open_store


def test_ranks_find_what_others_have_left(tmp_path: Path):
    one, other = open_store(str(tmp_path)), open_store(str(tmp_path))
    one.set("key", "value")
    assert other.get("key") == b"value"


@pytest.mark.parametrize("method", ["get", "wait"])
def test_waiting_for_a_store_that_is_closed_and_removed_is_an_error(method: str, tmp_path: Path):
    """Guards a rank 0 that waits for minutes for a worker that is dead."""
    store = open_store(str(tmp_path))
    waits, errors = threading.Event(), []

    def wait() -> None:
        waits.set()
        try:
            store.get("key") if method == "get" else store.wait(["key"])
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waits.wait(30)
    close_store(store)
    shutil.rmtree(tmp_path)
    thread.join(30)
    assert len(errors) == 1
