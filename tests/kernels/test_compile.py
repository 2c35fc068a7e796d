"""The kernels in the hands of the real compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.silu_and_mul import silu_and_mul_reference, silu_and_mul_triton
from nanovllm.utils.compile_ahead import compiling_only

PROGRAM = Path(__file__).with_name("compile_for_hopper.py")
# Debuggers' line numbers take an eighth of the time.
FASTER = {"TRITON_DISABLE_LINE_INFO": "1"}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="all sizes", marks=pytest.mark.exhaustive),
        pytest.param(["--few"], id="few sizes", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_for_a_hopper_gpu(options: list[str], tmp_path: Path):
    """Guards Python that only the interpreter takes, and tiles that need too much memory."""
    root = str(PROGRAM.parents[2])
    result = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        env={**os.environ, **FASTER, "PYTHONPATH": root, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "launches of 36 kernels" in result.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("capability", "kib"),
    [
        pytest.param(80, 163, marks=pytest.mark.exhaustive),
        pytest.param(89, 99, marks=pytest.mark.exhaustive),
        pytest.param(100, 227, marks=pytest.mark.exhaustive),
        pytest.param(120, 99, marks=pytest.mark.slow),
    ],
)
def test_attention_invariant_and_fp8_kernels_compile_for_other_gpus(
    capability: int, kib: int, tmp_path: Path
):
    """With windows, softcaps and sinks, and heads of 256."""
    program = PROGRAM.parent / "attention" / "compile_for.py"
    result = subprocess.run(
        [sys.executable, str(program), str(capability), str(kib)],
        env={
            **os.environ,
            **FASTER,
            "PYTHONPATH": str(PROGRAM.parents[2]),
            "TRITON_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"sm_{capability} " in result.stdout


AHEAD = """
import threading
import torch, triton
from triton import language as tl
from nanovllm.kernels import rms_norm, silu_and_mul
from nanovllm.utils.compile_ahead import compiling_only
from tests.kernels.compile_for_hopper import Hopper

def launch(dtype=torch.float32):
    silu_and_mul.silu_and_mul_triton(torch.zeros(2, 64, dtype=dtype))

def launch_elsewhere():
    try:
        launch()
    except Exception as error:  # no GPU
        errors.append(error)

@triton.jit
def broken(x):
    tl.no_such_function(x)

triton.runtime.driver.set_active(Hopper())
run, errors = triton.JITFunction.run, []
with compiling_only():
    for dtype in (torch.float16, torch.bfloat16):
        for _ in range(3):
            launch(dtype)
        x = torch.zeros(2, 64, dtype=dtype)
        rms_norm.rms_norm_triton(x, x[0], 1e-6)
    broken[(1,)](x)
    thread = threading.Thread(target=launch_elsewhere)
    thread.start()
    thread.join()
kernels = (silu_and_mul._silu_and_mul_kernel, rms_norm._rms_norm_kernel, broken)
print([len(kernel.device_caches[0][0]) for kernel in kernels], len(errors))
try:
    with compiling_only():
        1 / 0
except ZeroDivisionError:
    print(triton.JITFunction.run is run)
"""


def test_kernels_are_compiled_ahead_and_not_run(tmp_path: Path):
    """There is no GPU here that could run them: a launch from another thread, which is one, fails.
    So does a kernel that cannot be compiled, but later."""
    program = tmp_path / "program.py"
    program.write_text(AHEAD)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(PROGRAM.parents[2]), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, program],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == "[3, 2, 0] 1\nTrue\n"


@pytest.mark.gpu
def test_what_is_compiled_ahead_runs_later():
    x = torch.randn(3, 78, dtype=torch.float16, device="cuda")
    with compiling_only():
        silu_and_mul_triton(x)
    torch.testing.assert_close(silu_and_mul_triton(x), silu_and_mul_reference(x))
