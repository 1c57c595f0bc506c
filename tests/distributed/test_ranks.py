"""Sums, parts and agreement among real processes."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hessquant.ranks import ALONE, Ranks

SOURCE = Path(__file__).resolve().parents[2] / "src"


def together(count, program, tmp_path):
    """Run a program in some processes; each has `ranks` and puts into `result` what is given back, by rank."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from hessquant import ranks as module
            from hessquant.ranks import joined
            with joined() as ranks:
                result = None
            """
        )
        + textwrap.indent(textwrap.dedent(program), "    ")
        + f"\n    torch.save(result, {str(tmp_path)!r} + f'/{{ranks.rank}}.pt')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone", str(script)]
    subprocess.run(
        command, check=True, env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True,
    )  # fmt: skip
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(count)]


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_are_even_and_make_the_whole(length, count):
    parts = [list(range(length))[Ranks(rank, count).part_of(length)] for rank in range(count)]
    assert [item for part in parts for item in part] == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_process_by_itself_sums_and_gathers_nothing():
    total = torch.ones(3, 3)
    ALONE.sum(total)
    assert total.equal(torch.ones(3, 3))
    assert ALONE.gather(total, 3) is total
    assert (ALONE.tell(5), ALONE.tell_all(5)) == (5, [5])


@pytest.mark.parametrize("count", [2, 3])
def test_a_sum_is_that_of_the_ranks_in_order(count, tmp_path):
    program = """
    module.PIECE_BYTES = 1000  # several pieces
    made = torch.randn(37, 37, generator=torch.Generator().manual_seed(ranks.rank)).tril() * 10.0**ranks.rank
    everywhere, at_last = made.clone(), made.clone()
    ranks.sum(everywhere)
    ranks.sum_at(ranks.count - 1, at_last)
    result = made, everywhere, at_last
    """
    results = together(count, program, tmp_path)
    expected = results[0][0].clone()
    for made, _, _ in results[1:]:
        expected += made
    for made, everywhere, at_last in results[:-1]:
        assert everywhere.tril().equal(expected)
        assert at_last.equal(made)
    assert results[-1][1].tril().equal(expected)
    assert results[-1][2].tril().equal(expected)


def test_parts_are_put_together_and_things_told(tmp_path):
    program = """
    wholes = torch.arange(10).view(5, 2).to(torch.bfloat16), torch.arange(7, dtype=torch.uint8)
    gathered = [ranks.gather(whole[ranks.part_of(len(whole))], len(whole)) for whole in wholes]
    result = [*map(torch.equal, gathered, wholes)], ranks.tell(ranks.rank, by=1), ranks.tell_all(ranks.rank)
    """
    assert together(2, program, tmp_path) == [([True, True], 1, [0, 1])] * 2
