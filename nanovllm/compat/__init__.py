"""vLLM's interface: its argument names, its engine object, and ``import vllm`` for programs that
are written for it."""

from nanovllm.compat.alias import register_as_vllm

__all__ = ["register_as_vllm"]
