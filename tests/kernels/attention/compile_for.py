"""Compiles the attention kernels of models with windows, softcaps and sinks, the batch-invariant
kernels and those of FP8 weights, for a GPU, without one: run as a program, with its compute
capability and KiB of shared memory as arguments: ``80 163``."""

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.kernels import compile_for_hopper  # first: it turns the interpreter off

import torch  # isort: skip
import triton  # isort: skip

from nanovllm.kernels.attention.base import AttentionParams  # isort: skip

if __name__ == "__main__":
    capability, kib = map(int, sys.argv[1:])
    kernels = compile_for_hopper.compile_only(capability, kib << 10)
    with ThreadPoolExecutor() as executor, triton.AsyncCompileMode(executor):
        compile_for_hopper.launch_windows(all_sizes=False)
        features = AttentionParams(1.0, 4096, 50.0)
        compile_for_hopper.launch_attention(torch.bfloat16, 8, 4, 256, features, False)
        compile_for_hopper.launch_invariant_gemms(torch.bfloat16, all_sizes=False)
        if capability >= 89:
            compile_for_hopper.launch_fp8_linear(all_sizes=False)
        if capability in (89, 100):  # 120 has the memory and the matmuls of 89
            compile_for_hopper.launch_quantized(all_sizes=False)
    done = [k.result() if hasattr(k, "result") else k for _, k in kernels]
    assert {kernel.metadata.target.arch for kernel in done} == {capability}
    most = max(kernel.metadata.shared for kernel in done)
    assert most <= kib << 10, f"{most} bytes of shared memory on sm_{capability}"
    print(f"sm_{capability}", len(done), "launches")
