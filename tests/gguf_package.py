"""Makes transformers' reading of GGUF files three times as fast: it takes 20 s for SmolLM2."""

from functools import cache
from typing import Any

import numpy as np


def speed_up() -> None:
    import gguf  # not before tests run: xdist's first process would import it too

    # Transformers asks for the same names again for each of a model's modules.
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    get = gguf.GGUFReader._get

    def get_as_array(reader: Any, *args: Any, **kwargs: Any) -> Any:
        reader.data = reader.data.view(np.ndarray)  # a slice of a memmap runs Python
        return get(reader, *args, **kwargs)

    gguf.GGUFReader._get = get_as_array
