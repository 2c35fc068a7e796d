"""The interface between a linear layer and its weight.

A layer knows which part of a checkpoint tensor its rank holds, and when to reduce over the ranks.
Its ``LinearWeight`` knows how that part is stored, which kernel multiplies by it, and which input
format that kernel takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.rope import CacheSlots, RopeInputs
from nanovllm.kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from nanovllm.utils.distributed import RankPart
from nanovllm.utils.loader import check_shape

# The quant_methods of weights in FP8: with scales of rows, or of blocks of the weight.
FP8_METHODS = "fp8", "fp8_groups"
_config: ContextVar[Mapping[str, Any] | None] = ContextVar("quantization_config", default=None)
_batch_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def use_quantization(config: Mapping[str, Any] | None) -> Iterator[None]:
    """Sets the quantisation of linear layers that are created in this context.

    Args:
        config: its ``quant_method`` names the format of the weights (``WEIGHT_CLASSES``). Other
            entries are for the format's class. None for unquantised weights.
    """
    token = _config.set(config)
    try:
        yield
    finally:
        _config.reset(token)


def get_quantization_config() -> Mapping[str, Any]:
    return _config.get() or {}


@contextmanager
def use_batch_invariance(enabled: bool) -> Iterator[None]:
    """Sets whether layers that are created in this context compute a row with the same bits
    whatever the other rows are (``Config.batch_invariant``)."""
    token = _batch_invariant.set(enabled)
    try:
        yield
    finally:
        _batch_invariant.reset(token)


def is_batch_invariant() -> bool:
    """Returns whether layers under construction are batch-invariant."""
    return _batch_invariant.get()


@dataclass(frozen=True, slots=True, eq=False)
class InputFormat:
    """The format in which a linear layer takes its input, defined by the kernels that produce it.

    The kernels of an FP8 format return an ``Fp8Rows``: FP8 numbers with their scales.

    Attributes:
        rms_norm: (x, norm weight, eps, residual or None) -> (input, x + residual).
        silu_and_mul, gelu_tanh_and_mul: gate and up concatenated, [N, 2 I] -> input [N, I].
    """

    rms_norm: Callable[[Tensor | RankPart, Tensor, float, Tensor | None], tuple[Any, Tensor]]
    silu_and_mul: Callable[[Tensor], Any]
    gelu_tanh_and_mul: Callable[[Tensor], Any]


PLAIN = InputFormat(rms_norm, silu_and_mul, gelu_tanh_and_mul)  # one tensor of the model's dtype


class Shard(NamedTuple):
    """This rank's part of a checkpoint tensor, and its position in the rank's weight [out, in].

    Attributes:
        rows: the rows (output features) of the rank's weight that this part fills.
        dim: the dimension that is split over the ranks: 0 for output, 1 for input features.
        part, num_parts: index of this rank's part, and the number of equal parts into which the
            checkpoint tensor is split.
    """

    rows: slice = slice(None)
    dim: int = 0
    part: int = 0
    num_parts: int = 1

    def take(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns this rank's part of a checkpoint tensor.

        Args:
            shape: of the rank's whole weight.

        Raises:
            ValueError: the tensor has another shape than the model needs.
        """
        needed = [len(range(shape[0])[self.rows]), *shape[1:]]
        is_split = self.dim < len(needed)  # a bias has no input features
        if is_split:
            needed[self.dim] *= self.num_parts
        check_shape(needed, tensor)
        return tensor.chunk(self.num_parts, self.dim)[self.part] if is_split else tensor


class LinearWeight(ABC):
    """The weight [out, in] of a linear layer on this rank, as it is stored and multiplied.

    Its tensors are parameters of the layer, under the checkpoint's names ("weight", ...).

    Attributes:
        input_format: the format of ``matmul``'s input. ``matmul`` also takes a plain tensor,
            because attention returns one.
        bias: [out] in the model's dtype, added after each matmul, or None.
    """

    input_format: ClassVar[InputFormat] = PLAIN
    bias: Tensor | None = None

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer

    @abstractmethod
    def create_parameters(self, input_size: int, output_size: int) -> None:
        """Registers the parameters of this rank's part with the layer, without values."""

    @abstractmethod
    def load(self, param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
        """Copies this rank's part of a checkpoint tensor into a parameter of the layer, or into its
        bias. It may be called again after ``pack``. On a GPU the parameter then keeps its address,
        because CUDA graphs refer to it.

        Raises:
            ValueError: the tensor has another shape than the model needs, or an unknown dtype.
        """

    def pack(self) -> None:  # noqa: B027
        """Converts the weight to the layout with the fastest matmul. Call it after every load of a
        checkpoint. An embedding that shares the weight keeps the plain layout."""

    def release(self) -> None:  # noqa: B027
        """Frees the memory that ``pack`` has allocated outside of plain parameters. Its values are
        lost."""

    def restore(self) -> None:  # noqa: B027
        """Allocates what ``release`` has freed, without values. Does nothing if it has not."""

    @abstractmethod
    def matmul(self, x: Any) -> Tensor:
        """Computes x W^T + b: [N, in] -> [N, out]."""

    def matmul_swiglu(self, x: Any, act_fn: Any) -> Any:
        """Computes act_fn(x W^T + b): [N, in] -> [N, out / 2].

        The first half of W's rows is the gate projection, the second half the up projection.
        ``act_fn`` is from layers/activation.py. Kernels fuse SwiGLU only.
        """
        return act_fn(self.matmul(x))

    def matmul_add(self, x: Any, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiplies x by the weight, and adds the residual if a fused kernel can.

        Args:
            x: [N, in].
            residual: [N, out].

        Returns:
            (x W^T + b + residual, None), in which case ``residual`` may be overwritten. Otherwise
            (x W^T + b, residual), which the next ``norm_matmul`` adds. The former may be the parts
            of a split-K, fp32 [parts, N, out].
        """
        return self.matmul(x), residual

    def norm_matmul(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any, act_fn: Any = None
    ) -> tuple[Any, Tensor]:
        """Multiplies norm(x + residual) by the weight, and applies ``act_fn`` if it is given.

        Args:
            x: [N, in], plain; or, with a residual, parts of a sum, as ``matmul_add`` returns them,
                or a ``RankPart``.
            residual: [N, in], or None for zero.
            norm: an RMSNorm, whose ``weight`` [in] and ``eps`` are used; None for no norm.
            act_fn: the activation to apply to the result, or None.

        Returns:
            The result [N, out], or with ``act_fn`` [N, out / 2], and x + residual.
        """
        normed, total = self.normalize(x, residual, norm)
        return self.matmul(normed) if act_fn is None else self.matmul_swiglu(normed, act_fn), total

    def norm_and_matmul(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does what ``norm_matmul`` does, and returns the norm too. The weight is not quantised.

        Returns:
            norm(x + residual) [N, in], the matmul's result [N, out], and x + residual.
        """
        normed, total = self.normalize(x, residual, norm)
        return normed, self.matmul(normed), total

    def normalize(
        self, x: Tensor | RankPart, residual: Tensor | None, norm: Any
    ) -> tuple[Any, Tensor]:
        """Returns norm(x + residual), in the input format, and x + residual. The arguments are
        those of ``norm_matmul``."""
        if norm is None:
            assert isinstance(x, Tensor)  # ``RankPart`` is for norms
            total = x if residual is None else x + residual
            return total, total
        return self.input_format.rms_norm(x, norm.weight, norm.eps, residual)

    def norm_matmul_rope(
        self,
        x: Tensor | RankPart,
        residual: Tensor | None,
        norm: Any,
        rope: RopeInputs,
        slots: CacheSlots | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Computes ``norm_matmul`` and then ``apply_rope_and_store``. The matmul, RoPE and the
        store are one kernel. The rows of the weight are those of all query heads, key heads and
        value heads.

        Args:
            slots: where to store keys and values. None in a decode, without a KV cache, or if
                something else comes before RoPE: then nothing is fused.

        Returns:
            Queries and keys after RoPE and values, [N, out], and x + residual; None if no fused
            kernel supports these inputs.
        """
        return None
