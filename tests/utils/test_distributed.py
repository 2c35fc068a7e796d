"""The store in which ranks leave word for each other, and sums in the order of the ranks."""

import shutil
import threading
from pathlib import Path

import pytest
import torch

from nanovllm.utils.distributed import RankOrderTPGroup, TPGroup, close_store, open_store
from tests.kernels.rows import same_bits
from tests.layers.test_linear import run_ranks


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


def reduce_in_slices(group: TPGroup, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """All-reduces the rows of this rank's tensor all at once, one by one, and three at a time."""
    ordered, x = RankOrderTPGroup(group.rank, group.size, group.backend), parts[group.rank]
    each = [
        torch.cat([ordered.all_reduce(rows.clone()) for rows in x.split(size)])
        for size in (len(x), 1, 3)
    ]
    largest = ordered.all_reduce_max(torch.tensor([group.rank, -group.rank]))
    return [*each, largest]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_in_the_order_of_the_ranks(dtype: torch.dtype, tmp_path: Path):
    """gloo adds the chunks of a tensor in different orders."""
    parts = [*(torch.randn(4, 10, 33) * 10).to(dtype)]
    expected = (parts[0].float() + parts[1] + parts[2] + parts[3]).to(dtype)
    for *sums, largest in run_ranks(reduce_in_slices, parts, tmp_path, size=4):
        assert all(same_bits(found, expected) for found in sums)
        assert largest.tolist() == [3, 0]
