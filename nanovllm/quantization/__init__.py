"""How a linear layer's weight is stored and multiplied: one class for each storage format."""

from torch import nn

from nanovllm.quantization.base import LinearWeight, get_quantization_config
from nanovllm.quantization.unquantized import UnquantizedWeight

# By the ``quant_method`` of a checkpoint's ``quantization_config``; None for one without.
WEIGHT_CLASSES: dict[str | None, type[LinearWeight]] = {None: UnquantizedWeight}


def new_linear_weight(layer: nn.Module) -> LinearWeight:
    """The weight of a new linear layer, of the class for the quantisation in use.

    Raises:
        ValueError: no class serves this quantisation.
    """
    method = get_quantization_config().get("quant_method")
    if method not in WEIGHT_CLASSES:
        raise ValueError(f"{method!r} quantisation is not served: use an unquantised checkpoint")
    return WEIGHT_CLASSES[method](layer)
