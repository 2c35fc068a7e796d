from tests.kernels.conftest import device, dtype  # noqa: F401
