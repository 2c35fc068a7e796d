"""The prototype of a prefill kernel in Gluon, run by an emulator."""

import pytest

from tests.kernels.gluon_emulator import emulated


@pytest.mark.slow
def test_gluon_prefill_is_attention():
    with emulated("benchmarks.gluon_kernel", "benchmarks.gluon_prefill") as (_, prefill):
        Case = prefill.Case
        cases = (
            Case(((1, 1),)),
            Case(((128, 128), (1, 1), (193, 193), (64, 64))),
            Case(((130, 130), (2, 300), (77, 440)), kv_heads=1),
            Case(((300, 300), (130, 401)), window=128, softcap=50.0, sinks=True),
            Case(((260, 260), (40, 700)), window=100, page_size=16),
            Case(((150, 150), (3, 256), (200, 450)), page_size=256),
            Case(((150, 150), (3, 96), (70, 450)), page_size=48),
        )
        problems = {
            f"{tile.name} {case}": problem
            for tile in (
                prefill.Tile(128, 2, 128, 2),
                prefill.Tile(64, 3, 64, 4),
                prefill.Tile(64, 2, 64, 2, num_q_stages=1, ping_pong=False, named_barriers=False),
            )
            for case in cases
            if (problem := prefill.check(tile, case, "cpu"))
        }
    assert not problems, problems
