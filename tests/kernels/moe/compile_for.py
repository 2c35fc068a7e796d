"""Compiles the kernels of mixtures of experts for a GPU, without one: run as a program, with its
compute capability and KiB of shared memory as arguments: ``80 163``."""

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.kernels import compile_for_hopper  # first: it turns the interpreter off

import torch  # isort: skip
import triton  # isort: skip
from triton.backends.compiler import GPUTarget  # isort: skip

from nanovllm.kernels.moe import grouped  # isort: skip

if __name__ == "__main__":
    capability, kib = map(int, sys.argv[1:])
    target = GPUTarget("cuda", capability, 32)
    compile_for_hopper.Hopper.get_current_target = lambda self: target  # type: ignore[method-assign]
    kernels = compile_for_hopper.compile_only()
    grouped.shared_memory = lambda device: kib << 10  # type: ignore[assignment]
    if capability < 90:
        for module in compile_for_hopper.PDL_MODULES:
            module.pdl_options = lambda x: {"PDL": False}  # type: ignore[attr-defined]
    with ThreadPoolExecutor() as executor, triton.AsyncCompileMode(executor):
        # All sizes for the GPU with the least memory only: on others, the same Python is compiled.
        all_sizes = capability == 89
        compile_for_hopper.launch_mixtures(torch.bfloat16, all_sizes)
        if all_sizes:  # fp32 takes the CUDA cores of every GPU in the same way
            compile_for_hopper.launch_mixtures(torch.float32, False)
        compile_for_hopper.launch_fp8_mixtures(all_sizes, capability >= 89)
    done = [(n, k.result() if hasattr(k, "result") else k) for n, k in kernels]
    assert {kernel.metadata.target.arch for _, kernel in done} == {capability}
    most = max(kernel.metadata.shared for _, kernel in done)
    assert most <= kib << 10, f"{most} bytes of shared memory on sm_{capability}"
    print(f"sm_{capability}", len(done), "launches of", len({n for n, _ in done}), "kernels")
