import pytest

from nanovllm.engine.cuda_graphs import capture_sizes


@pytest.mark.parametrize("sizes", [1, 3, 8, 100, 257, 512, 600])
def test_no_batch_size_lacks_a_graph(sizes):
    captured = capture_sizes(sizes)
    assert captured == sorted(set(captured)) and captured[-1] == min(sizes, 512)
