"""The parameters of a rotary embedding, and the tables computed from them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a checkpoint.

    Attributes:
        inv_freq: the frequency of each pair of features, in radians per position. The pairs make
            up the first 2 * len(inv_freq) features of a head, and the others have no RoPE.
        scale: factor of cosines and sines, the attention factor of YaRN and LongRoPE.
        interleaved: whether the pairs are features 2i and 2i + 1; otherwise i and
            len(inv_freq) + i.
        long: (length, inv_freq), the frequencies for engines whose maximum length exceeds
            ``length`` (LongRoPE); None if there are no others.
        query_scaling: (beta, length): the query at position p is multiplied by
            1 + beta * log(1 + p // length); None for 1.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False
    long: tuple[int, tuple[float, ...]] | None = None
    query_scaling: tuple[float, int] | None = None

    def head_order(self, head_dim: int) -> list[int] | None:
        """Returns, for each feature of a head here, its index in a head of the checkpoint. Returns
        None if the order is the same.

        The kernels rotate pairs of features i and i + head_dim / 2. Features without RoPE become
        pairs with angle 0.
        """
        num_pairs = len(self.inv_freq)
        if num_pairs == head_dim // 2 and not self.interleaved:
            return None
        rotated, rest = range(2 * num_pairs), range(2 * num_pairs, head_dim)
        if self.interleaved:
            first, second = rotated[::2], rotated[1::2]
        else:
            first, second = rotated[:num_pairs], rotated[num_pairs:]
        middle = len(rest) // 2
        return [*first, *rest[:middle], *second, *rest[middle:]]


def cos_sin_table(rope: RopeConfig | None, head_dim: int, max_position: int) -> torch.Tensor:
    """Returns fp32 [max_position, head_dim]: head_dim / 2 cosines, then head_dim / 2 sines. If
    ``rope`` is None, every angle is 0."""
    inv_freq, scale = (rope.inv_freq, rope.scale) if rope is not None else ((), 1.0)
    # fp64, because at position 100,000 the error of an fp32 angle is 4e-3.
    angles = torch.outer(
        torch.arange(max_position, dtype=torch.float64),
        torch.tensor(inv_freq, dtype=torch.float64),
    )
    num_unrotated = head_dim // 2 - len(inv_freq)
    cos = F.pad(angles.cos() * scale, (0, num_unrotated), value=1.0)
    sin = F.pad(angles.sin() * scale, (0, num_unrotated))
    return torch.cat((cos, sin), dim=-1).float()


def query_scales(rope: RopeConfig | None, max_position: int) -> torch.Tensor | None:
    """Returns [max_position, 1, 1] in the default dtype: the factor of the query at each position,
    applied before RoPE. Returns None if queries are not scaled."""
    if rope is None or rope.query_scaling is None:
        return None
    beta, length = rope.query_scaling
    steps = torch.arange(max_position) // length
    scales = (1 + beta * steps.double().log1p()).to(torch.get_default_dtype())
    return scales.view(-1, 1, 1)
