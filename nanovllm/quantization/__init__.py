"""How a linear layer's weight is stored and multiplied: one class for each storage format."""

from collections.abc import Callable
from functools import partial

from torch import nn

from nanovllm.quantization.base import (
    FP8_METHODS,
    LinearWeight,
    get_quantization_config,
    is_batch_invariant,
)
from nanovllm.quantization.unquantized import UnquantizedWeight


def _new_fp8_weight(layer: nn.Module, has_groups: bool = False) -> LinearWeight:
    from nanovllm.quantization.fp8 import new_fp8_weight

    return new_fp8_weight(layer, has_groups)


# Formats of quantised weights, by ``quant_method`` (see ``use_quantization``). Those of experts are
# in experts.py.
WEIGHT_CLASSES: dict[str, Callable[[nn.Module], LinearWeight]] = {
    "fp8": _new_fp8_weight,
    "fp8_groups": partial(_new_fp8_weight, has_groups=True),
}


def new_linear_weight(layer: nn.Module) -> LinearWeight:
    """Creates the weight of a new linear layer, for the quantisation in use.

    Raises:
        ValueError: the quantisation is not supported, or not with ``batch_invariant``.
    """
    method = get_quantization_config().get("quant_method")
    if method is not None and method not in WEIGHT_CLASSES:
        raise ValueError(f"{method!r} quantisation is not supported: use an unquantised checkpoint")
    if is_batch_invariant():
        from nanovllm.quantization.batch_invariant import BatchInvariantWeight, RoundedToFp8Weight

        if method not in (None, *FP8_METHODS):
            raise ValueError(f"{method!r} quantisation is not supported with batch_invariant=True")
        # An FP8 checkpoint is dequantised as it is read (``startup.weight_quantization``).
        return BatchInvariantWeight(layer) if method is None else RoundedToFp8Weight(layer)
    return UnquantizedWeight(layer) if method is None else WEIGHT_CLASSES[method](layer)


def new_vocabulary_weight(layer: nn.Module) -> UnquantizedWeight:
    """Creates the weight of an embedding or an LM head, which is never quantised."""
    if is_batch_invariant():
        from nanovllm.quantization.batch_invariant import BatchInvariantVocabulary

        return BatchInvariantVocabulary(layer)
    return UnquantizedWeight(layer)
