from tests.kernels.conftest import device, dtype, exact_fp8  # noqa: F401
