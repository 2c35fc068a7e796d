import torch

from nanovllm.kernels.ordered_bits import ordered_bits

INF = float("inf")


def test_integers_have_the_order_of_the_numbers_and_give_their_bits_back():
    numbers = [-INF, -3e38, -2.0, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 2.0, 3e38, INF]
    bits = torch.tensor(numbers).view(torch.int32)
    keys = ordered_bits(bits)
    assert (keys[1:] > keys[:-1]).all()
    assert torch.equal(ordered_bits(keys), bits)
