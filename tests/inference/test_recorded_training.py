"""Training with recorded launches (torch.cuda.make_graphed_callables): the numbers of an eager step."""

import pytest
import torch
import torch.nn.functional as F

import saccade

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "sparseformer_nano", "vt_nano"])
def test_a_recorded_model_learns_as_an_eager_one(name):
    images = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.arange(8, device="cuda")
    losses = {}
    for recorded in (False, True):
        torch.manual_seed(0)
        model = saccade.create_model(name, num_classes=8).cuda().to(memory_format=torch.channels_last).train()
        start = {key: value.clone() for key, value in model.state_dict().items()}
        forward = model
        if recorded:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                forward = torch.cuda.make_graphed_callables(model, (images,))
            model.load_state_dict(start)  # recording took a few steps of the norms' statistics
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[recorded] = []
        for _ in range(6):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(forward(images).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses[recorded].append(loss.item())
        model.eval()
        assert model(images[:3]).shape == (3, 8)  # another size: answers are not recorded
    assert losses[True][-1] < losses[True][0]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
