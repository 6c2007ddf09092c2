"""Rows with gaps between them: the same values and gradients, at places that products like."""

import pytest
import torch

from saccade.kernels import even_rows as kernels
from saccade.kernels import suits
from saccade.tokens import clusters
from saccade.tokens.clusters import ClusterTokenizer, LinearClustering

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("length", "step"), [(196, 200), (49, 56), (1, 8), (16, 16)])
def test_rows_start_at_multiples_of_sixteen_bytes(length, step):
    matrices = torch.randn(2, 3, length, device=DEVICE).bfloat16().requires_grad_()
    even = kernels.even_rows(matrices)
    assert even.stride() == (3 * step, step, 1)
    assert torch.equal(even, matrices)
    assert torch.equal(kernels._spread(matrices.detach()), matrices)
    g = torch.randn_like(even)
    assert torch.equal(torch.autograd.grad(even, matrices, g)[0], g)


def test_odd_means_odd():
    assert kernels.are_odd(torch.empty(1, 2, 196, dtype=torch.float16))
    assert not kernels.are_odd(torch.empty(1, 2, 784, dtype=torch.float16))
    assert not kernels.are_odd(torch.empty(1, 2, 196))


def test_the_operator_is_sound():
    torch.library.opcheck(kernels._op, (torch.randn(2, 3, 5, requires_grad=True),))


def test_a_compiler_keeps_the_gaps():
    run = torch.compile(lambda x: kernels.even_rows(x) * 1, backend="aot_eager", fullgraph=True)
    matrices = torch.randn(2, 3, 12)
    assert torch.equal(run(matrices), matrices)
    seen = []
    watch = torch.compile(
        lambda x: kernels.even_rows(x), backend=lambda graph, _: seen.extend(graph.graph.nodes) or graph.forward
    )
    assert watch(matrices).stride() == (48, 16, 1)
    assert any("even_rows" in str(node.target) for node in seen)


def test_a_tokenizer_takes_it_and_says_the_same(monkeypatch):
    torch.manual_seed(0)
    tokenizer = ClusterTokenizer(16, LinearClustering(16, 5)).to(DEVICE)
    features = torch.randn(2, 16, 3, 3, device=DEVICE, requires_grad=True)

    def learn():
        tokens, assignment, _ = tokenizer(features)
        return tokens, assignment, torch.autograd.grad(tokens.square().sum(), features)[0]

    plain = learn()
    monkeypatch.setattr(clusters, "suits", lambda *tensors: True)
    monkeypatch.setattr(clusters, "are_odd", lambda matrices: True)
    ours = learn()
    assert ours[1].stride() == (80, 16, 1)
    assert not suits(torch.empty(1))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
