"""How a linear layer's weight is stored and multiplied: one class for each storage format."""

from torch import nn

from nanovllm.quantization.base import (
    LinearWeight,
    get_quantization_config,
    is_batch_invariant,
)
from nanovllm.quantization.unquantized import UnquantizedWeight

# Formats of quantised weights, by ``quant_method`` in a checkpoint's ``quantization_config``. There
# is none yet.
WEIGHT_CLASSES: dict[str, type[LinearWeight]] = {}


def new_linear_weight(layer: nn.Module) -> LinearWeight:
    """Creates the weight of a new linear layer, for the quantisation in use.

    Raises:
        ValueError: the quantisation is not supported.
    """
    method = get_quantization_config().get("quant_method")
    if method is not None and (method not in WEIGHT_CLASSES or is_batch_invariant()):
        raise ValueError(f"{method!r} quantisation is not supported: use an unquantised checkpoint")
    if is_batch_invariant():
        from nanovllm.quantization.batch_invariant import BatchInvariantWeight

        return BatchInvariantWeight(layer)
    return UnquantizedWeight(layer) if method is None else WEIGHT_CLASSES[method](layer)


def new_vocabulary_weight(layer: nn.Module) -> UnquantizedWeight:
    """Creates the weight of an embedding or an LM head, which is never quantised."""
    if is_batch_invariant():
        from nanovllm.quantization.batch_invariant import BatchInvariantVocabulary

        return BatchInvariantVocabulary(layer)
    return UnquantizedWeight(layer)
