"""Sums over rows against float64."""

import pytest
import torch

from saccade.ops import _rows
from saccade.ops._launch import record_specializations
from saccade.ops._rows import column_sum
from tests.ops.compare import DEVICE, HALF, needs_triton, randn, relative_error

pytestmark = needs_triton


@pytest.mark.parametrize("shape", [(1, 3), (300, 40), (70, 300), (2500, 16), (1030, 96), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("programs", [528, 3])
def test_column_sum_matches_float64(shape, dtype, programs, monkeypatch):
    monkeypatch.setattr(_rows, "PROGRAMS", programs)
    rows = randn(*shape, dtype=dtype)
    sums = column_sum(rows)
    assert sums.dtype == torch.float32
    assert relative_error(sums, rows.double().sum(0)) < 1e-5


def test_column_sum_compiles_two_kernels_for_all_sizes_and_wide_rows():
    with record_specializations(execute=False) as compiled:
        for rows in range(1, 3000, 17):
            for channels in (128, 256, 2560):
                column_sum(torch.zeros(rows, channels, device=DEVICE))
    assert len(compiled) == 2  # for few rows, and for many


def test_column_sum_of_few_rows_compiles_what_many_rows_need():
    with record_specializations() as few:
        sums = column_sum(torch.ones(3, 32, device=DEVICE))
    with record_specializations() as many:
        column_sum(torch.ones(3000, 32, device=DEVICE))
    assert few == many
    assert sums.tolist() == [3.0] * 32
