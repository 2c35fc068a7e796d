"""The activation of the experts, called by the kernels that compute gate and up."""

from nanovllm.utils.triton_compat import tl, triton


@triton.jit
def gated_activation(
    gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Computes the activation that ``ExpertWeights`` describes, in fp32. Rounds gate, up and the
    activated gate to DTYPE, as separate kernels would. LIMIT None means SwiGLU."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1
    return (gate / (1 + tl.exp(-ALPHA * gate))).to(DTYPE).to(tl.float32) * up
