"""FP8 weights of safetensors checkpoints, dequantised as they are read or, on GPUs, kept in FP8.

Each block of a weight has a scale. ``x.weight`` in float8_e4m3fn times ``x.weight_scale_inv``, or
``x.weight_scale``, is the weight. Despite its name, weight_scale_inv is multiplied, not divided by.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from nanovllm.kernels.fp8 import GROUP, Fp8Rows, check_not_nan, pack_rows
from nanovllm.models.family import unsupported_quantization
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.math import cdiv
from nanovllm.utils.panics import as_value_error

logger = logging.getLogger("nanovllm")

Block = tuple[int, int]

SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale")
# Endings of the names of projection weights: of attention and MLPs, of all experts in one tensor,
# and of experts of Mixtral and Granite.
PROJECTIONS = ("_proj.weight", "_proj", "w1.weight", "w2.weight", "w3.weight", "_linear.weight")
# Scales of FP8 activations and of an FP8 KV cache, which both stay unquantised here.
SKIPPED = tuple(
    f"*.{name}"
    for name in (
        *("activation_scale", "input_scale", "input_scale_ub", "output_scale"),
        *("q_scale", "k_scale", "v_scale", "kv_scale"),
    )
)
WHOLE = sys.maxsize  # a block of this size is clamped to the weight's
TENSOR, CHANNEL = (WHOLE, WHOLE), (1, WHOLE)
# Both formats of compressed-tensors store FP8 weights identically.
COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """How a checkpoint stores its FP8 weights.

    A tensor's dtype tells whether it is in FP8. The config's lists of unquantised modules are
    therefore not read.

    Attributes:
        blocks: the possible sizes (rows, columns) of the blocks that share a scale. The shape of a
            weight's scales tells which one it has.
    """

    blocks: tuple[Block, ...]

    @classmethod
    def from_config(cls, config: Any) -> "Fp8Weights | None":
        """Reads a ``quantization_config``. Returns None if its method is not one for FP8.

        Raises:
            ValueError: the method is one for FP8, but with unsupported or invalid settings.
        """
        method = config.get("quant_method") if isinstance(config, Mapping) else None
        read = METHODS.get(str(method))
        return None if read is None else cls(tuple(read(config)))

    def with_skipped_scales(self, config: ModelConfig) -> ModelConfig:
        """Returns the model's config with the scales of activations and KV caches skipped."""
        names = config.weight_names
        return replace(config, weight_names=replace(names, skipped=(*names.skipped, *SKIPPED)))

    def kept_method(self, paths: Iterable[Path], config: ModelConfig) -> str | None:
        """Returns the quantisation of linear layers (``quantization.WEIGHT_CLASSES``) that keeps
        the weights of projections in FP8: "fp8" if each row has one scale, "fp8_groups" if blocks
        have GROUP rows and columns. Returns None if they have other blocks, or if a projection that
        the model has is not in FP8.

        Raises:
            ValueError: a file cannot be read.
        """
        if not self.blocks:
            return None
        for path in paths:
            with as_value_error(f"{path} cannot be read:"), safe_open(path, framework="pt") as file:
                for name in filter(_is_projection, file.keys()):
                    if any(fnmatchcase(name, skip) for skip in config.weight_names.skipped):
                        continue
                    if file.get_slice(name).get_dtype() != "F8_E4M3":
                        return None
        if all(columns == WHOLE for _, columns in self.blocks):
            return "fp8"
        return "fp8_groups" if {*self.blocks} == {(GROUP, GROUP)} else None

    def dequantize(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        paths: Sequence[Path],
        packs: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the names and tensors of a checkpoint, with FP8 weights dequantised to fp32.

        Args:
            packs: pack the weights of projections into rows instead: see ``pack_rows``.
            tensors: all tensors of the files, in any order, on any device.
            paths: the files. The scales, which are small, are read from them in advance: they may
                be in other files than their weights.

        Raises:
            ValueError: a weight or a scale is missing or damaged. The message names it.
        """
        scales = read_scales(paths)
        if not packs:
            logger.info(
                "FP8 weights are dequantised as they are read, and take as much memory as "
                "unquantised ones (in bf16, 2 bytes each), unless quantization='fp8' quantises "
                "all projections again"
            )
        for name, tensor in tensors:
            if name.endswith(SCALE_SUFFIXES):
                continue
            is_fp8 = tensor.is_floating_point() and tensor.itemsize == 1
            if not is_fp8 and name not in scales:
                yield name, tensor
                continue
            if name not in scales:
                raise ValueError(f"checkpoint tensor {name} is {tensor.dtype}, but it has no scale")
            if not self.blocks:
                raise ValueError(
                    f"checkpoint tensor {name} has a scale, but the config_groups in the config "
                    f"describe no weights"
                )
            try:
                unpack = pack_fp8 if packs and _is_projection(name) else dequantize_fp8
                weight = unpack(tensor, scales[name], self.blocks)
            except ValueError as error:
                raise ValueError(f"checkpoint tensor {name}: {error}") from None
            yield name, weight


def read_scales(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Reads the scales of all weights.

    Returns:
        The scales by the names of their weights, in fp32 on the CPU.

    Raises:
        ValueError: a scale has no weight, occurs twice, is negative or is not finite.
    """
    names: set[str] = set()
    scales: dict[str, torch.Tensor] = {}
    for path in paths:
        with as_value_error(f"{path} cannot be read:"), safe_open(path, framework="pt") as file:
            in_file = file.keys()
            found = {n: file.get_tensor(n) for n in in_file if n.endswith(SCALE_SUFFIXES)}
        names.update(in_file)
        for name, stored in found.items():
            weight = name.removesuffix("_inv").removesuffix("_scale")
            if weight in scales:
                raise ValueError(f"checkpoint tensor {weight} has two scales")
            if not stored.is_floating_point():
                raise ValueError(f"checkpoint tensor {name}: a scale cannot be {stored.dtype}")
            scale = stored.float()
            if not (scale.isfinite() & (scale >= 0)).all():
                raise ValueError(f"checkpoint tensor {name}: scales must be finite and at least 0")
            scales[weight] = scale
    if alone := sorted(scales.keys() - names):
        raise ValueError(f"checkpoint tensor {alone[0]} is missing, though it has a scale")
    return scales


def dequantize_fp8(
    weight: torch.Tensor, scale: torch.Tensor, blocks: Iterable[Block]
) -> torch.Tensor:
    """Multiplies an FP8 weight by its scales.

    Args:
        weight: float8_e4m3fn [..., out, in].
        scale: fp32 [..., blocks of rows, blocks of columns] on the CPU. Trailing dimensions of
            size 1 may be left out.
        blocks: the possible block sizes (rows, columns). The last block of a row or column may be
            smaller.

    Returns:
        fp32 [..., out, in], on the weight's device.

    Raises:
        ValueError: the weight has another dtype or is NaN, the scale has another shape, or a scale
            is 0 though its weights are not.
    """
    scale, block = _match(weight, scale, blocks)
    return _multiply_blocks(weight.float(), scale, block)


def pack_fp8(weight: torch.Tensor, scale: torch.Tensor, blocks: Iterable[Block]) -> torch.Tensor:
    """Packs FP8 matrices and their scales, with the scales of each row: see ``pack_rows``. The
    arguments and errors are those of ``dequantize_fp8``."""
    scale, (rows, _) = _match(weight, scale, blocks)
    scale = scale.to(weight.device).repeat_interleave(rows, -2)[..., : weight.size(-2), :]
    return pack_rows(Fp8Rows(weight, scale))


def _is_projection(name: str) -> bool:
    return name.endswith(PROJECTIONS)


def _match(
    weight: torch.Tensor, scale: torch.Tensor, blocks: Iterable[Block]
) -> tuple[torch.Tensor, Block]:
    """Checks a weight and its scales. Returns the scales with all dimensions, and the size of a
    block, clamped to the weight's."""
    if weight.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"a weight with a scale must be float8_e4m3fn, got {weight.dtype}")
    check_not_nan(weight.view(torch.uint8))
    if weight.dim() < 2 or not weight.numel():
        raise ValueError(f"FP8 weights must be matrices, got shape {list(weight.shape)}")
    *leading, num_rows, num_columns = weight.shape
    clamped = [(min(rows, num_rows), min(columns, num_columns)) for rows, columns in blocks]
    shapes = [
        (*leading, cdiv(num_rows, rows), cdiv(num_columns, columns)) for rows, columns in clamped
    ]
    pairs = zip(shapes, clamped, strict=True)
    fits = {pair for pair in pairs if _significant(pair[0]) == _significant(scale.shape)}
    if len(fits) != 1:
        needed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"its scale must have shape {needed}, but has {list(scale.shape)}")
    ((shape, block),) = fits
    scale = scale.reshape(shape)
    if not scale.all() and _multiply_blocks(weight.float(), (scale == 0).float(), block).any():
        raise ValueError("one of its scales is 0, but the weights in that block are not")
    return scale, block


def _significant(shape: Sequence[int]) -> list[int]:
    """Returns a shape without trailing dimensions of size 1."""
    sizes = list(shape)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _multiply_blocks(values: torch.Tensor, scale: torch.Tensor, block: Block) -> torch.Tensor:
    """Multiplies each block of ``values`` by its scale, in place. Returns ``values``."""
    (rows, columns), (num_rows, num_columns) = block, values.shape[-2:]
    # Only the rows of scales are repeated. Columns are broadcast, which saves a copy of the weight.
    scale = scale.to(values.device).repeat_interleave(rows, -2)[..., :num_rows, :]
    num_full = num_columns // columns
    full, rest = values.split([num_full * columns, num_columns % columns], -1)
    full.unflatten(-1, (num_full, columns)).mul_(scale[..., :num_full, None])
    rest.mul_(scale[..., num_full:])
    return values


def _read_fine_grained(config: Mapping[str, Any]) -> Iterator[Block]:
    """Reads transformers' FineGrainedFP8Config, or AutoFP8's config, which has no blocks."""
    if (experts := config.get("expert_dtype", "fp8")) != "fp8":
        raise unsupported_quantization(f"fp8 with {experts} experts")
    size = config.get("weight_block_size")
    yield TENSOR if size is None else _read_block("weight_block_size", size)


def _read_modelopt(config: Mapping[str, Any]) -> Iterator[Block]:
    if (algorithm := config.get("quant_algo")) != "FP8":
        raise unsupported_quantization(f"modelopt {algorithm}")
    yield TENSOR


def _read_compressed_tensors(config: Mapping[str, Any]) -> Iterator[Block]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise ValueError(f"config_groups must be an object of objects, got {groups!r:.80}")
    if _object_or_none(config, "transform_config").get("config_groups"):
        raise unsupported_quantization("compressed-tensors with transforms")
    sparsity = _object_or_none(config, "sparsity_config").get("format") or "dense"
    if sparsity != "dense":
        raise unsupported_quantization(f"compressed-tensors {sparsity}")
    for group in groups.values():
        weights = _object_or_none(group, "weights")
        if group.get("weights") is None:  # the group is about activations only
            continue
        storage = group.get("format") or config.get("format")
        if storage not in COMPRESSED_FORMATS:
            raise unsupported_quantization(f"compressed-tensors {storage}")
        dtype, strategy = f"{weights.get('type')}{weights.get('num_bits')}", weights.get("strategy")
        if dtype != "float8" or strategy not in ("tensor", "channel", "block"):
            raise unsupported_quantization(
                f"compressed-tensors {dtype} with a scale per {strategy}"
            )
        if strategy == "block":
            yield _read_block("block_structure", weights.get("block_structure"))
        else:
            yield TENSOR if strategy == "tensor" else CHANNEL


def _object_or_none(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a field that is an object, empty if the field is None or missing."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {value!r:.80}")
    return value or {}


def _read_block(name: str, size: Any) -> Block:
    if isinstance(size, (list, tuple)) and len(size) == 2:
        rows, columns = size
        if type(rows) is type(columns) is int and min(size) > 0:
            return rows, columns
    raise ValueError(f"{name} must be a list of two positive ints, got {size!r:.80}")


# By the values of ``quant_method``: functions from a ``quantization_config`` to possible blocks.
METHODS = {
    "fp8": _read_fine_grained,
    "fbgemm_fp8": lambda config: [CHANNEL],
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed_tensors,
}
