"""Compatibility with vLLM: its argument names, its engine object, and an ``import vllm`` that finds
nanovllm."""

from nanovllm.compat.alias import register_as_vllm

__all__ = ["register_as_vllm"]
