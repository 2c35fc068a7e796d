"""The names of parameters in checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WeightName = tuple[str, str] | tuple[str, str, str | int]


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Which checkpoint tensor fills which parameter.

    Attributes:
        rows: (tensor, parameter), or (tensor, parameter, shard id) for a part of a packed
            parameter. Names have fields in braces: ``model.layers.{layer}.mlp.up_proj.{kind}``.
            A parameter without a row has the same name in checkpoints.
        fields: the values of each field. If the tensor's name has a field that the parameter's
            name lacks, such as the index of an expert, the parameter's ``weight_loader`` gets its
            value as a keyword argument. Rows with a shard id or such a field are parts of a
            parameter, and a checkpoint has all of them. Any other row is a whole parameter.
        skipped: shell-style patterns (fnmatch). Tensors whose names in the checkpoint match one are
            not needed. A log line states their number, and the patterns.
    """

    rows: tuple[WeightName, ...]
    fields: Mapping[str, Sequence[str | int]]
    skipped: tuple[str, ...] = ()
