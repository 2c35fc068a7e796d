"""The experts' activation, as the kernels that compute gate and up apply it."""

from nanovllm.utils.triton_compat import tl, triton


@triton.jit
def gated_activation(
    gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """See ``mix.Experts``. Rounds intermediate results as separate kernels would."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1
    return (gate / (1 + tl.exp(-ALPHA * gate))).to(DTYPE).to(tl.float32) * up
