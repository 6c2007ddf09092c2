"""`saccade.record`."""

import pytest
import torch

import saccade
from saccade.explanation.hooks.record import block_name, record


def test_saccade_record_is_the_hook():
    assert saccade.record is record


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("stages.0.blocks.1.attn.tokenizer", "stages.0.blocks.1"),
        ("backbone.stages.2.blocks.10.attn.tokenizer", "backbone.stages.2.blocks.10"),
        ("_orig_mod.stages.0.blocks.1.attn.tokenizer", "stages.0.blocks.1"),
        ("focusing.sampler", "focusing.sampler"),
    ],
)
def test_block_name_is_the_enclosing_block(module, block):
    assert block_name(module) == block


def test_record_keeps_execution_order_and_graph():
    model = saccade.create_model("svit_nano").eval()
    with saccade.record(model) as traces:
        model(torch.randn(1, 3, 64, 64))
    assert [trace.name for trace in traces] == ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"]
    assert [trace.grid for trace in traces] == [(4, 4)] * 3
    assert traces[0].tokens.requires_grad
    assert not traces[0].association.requires_grad


def test_record_counts_the_calls_of_a_module():
    model = saccade.create_model("svit_nano").eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(torch.zeros(1, 3, 64, 64))
        model(torch.randn(2, 3, 64, 96))
    assert [trace.step for trace in traces] == [0, 0, 0, 1, 1, 1]
    assert traces[0].size == (16, 16)
    assert traces[3].size == (16, 24)


def test_record_ignores_recomputation_in_backward():
    model = saccade.create_model("svit_nano").train()
    model.set_grad_checkpointing()
    with saccade.record(model) as traces:
        model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert len(traces) == 3


def test_record_runs_a_compiled_model_eagerly():
    model = saccade.create_model("svit_nano").eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(torch.randn(1, 3, 64, 64))
        with saccade.record(compiled) as traces:
            compiled(torch.randn(1, 3, 64, 64))
    assert [trace.name for trace in traces] == ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"]
    torch._dynamo.reset()


def test_record_removes_its_hooks_after_an_error():
    model = saccade.create_model("svit_nano").eval()
    before = [list(module._forward_hooks) for module in model.modules()]
    with pytest.raises(ValueError, match="batch axis"), saccade.record(model):
        model(torch.randn(3, 64, 64))
    assert [list(module._forward_hooks) for module in model.modules()] == before


def test_record_refuses_a_model_without_tokens():
    with (
        pytest.raises(ValueError, match="expected a model that groups pixels into tokens, got Linear"),
        saccade.record(torch.nn.Linear(2, 2)),
    ):
        pass
