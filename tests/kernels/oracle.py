"""The bound that every kernel has to keep."""

from collections.abc import Callable

import torch


def assert_as_good_as_eager(
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    ulps: float = 2.0,
    factor: float = 2.0,
) -> None:
    """The kernel's largest error is at most ``factor`` times eager PyTorch's in the same dtype,
    both against fp64; ``ulps`` units in the last place are allowed where eager is exact."""
    assert ours.dtype == eager.dtype and ours.shape == eager.shape
    assert torch.isfinite(ours).all()
    error = (ours.double() - exact).abs().max()
    bound = factor * (eager.double() - exact).abs().max()
    slack = ulps * torch.finfo(ours.dtype).eps * exact.abs().max()
    assert error <= torch.maximum(bound, slack), f"error {error:.3e}, eager's {bound / factor:.3e}"


def in_fp64(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    return function(*(t.double() if t.is_floating_point() else t for t in tensors))


def poisoned(monkeypatch) -> None:
    """Makes torch.empty return NaN, so that an element that a kernel forgets shows."""
    empty = torch.empty

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).max // 2)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(
        torch, "empty_like", lambda t, **k: fill(empty(t.shape, dtype=t.dtype, device=t.device))
    )
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda t, *shape, dtype=None, **k: fill(
            empty(*shape, dtype=dtype or t.dtype, device=t.device)
        ),
    )
