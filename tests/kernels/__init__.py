import pytest

pytest.register_assert_rewrite("tests.kernels.oracle")  # python -O leaves only pytest's asserts in
