"""Training captured by torch.cuda.make_graphed_callables has the losses of eager training."""

import pytest
import torch
import torch.nn.functional as F

import saccade

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@pytest.mark.parametrize("name", ["svit_nano", "paca_nano", "sparseformer_nano", "vt_nano"])
def test_graphed_training_equals_eager_training(name):
    images = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.arange(8, device="cuda")
    losses = {}
    for graphed in (False, True):
        torch.manual_seed(0)
        model = saccade.create_model(name, num_classes=8).cuda().to(memory_format=torch.channels_last).train()
        start = {key: value.clone() for key, value in model.state_dict().items()}
        forward = model
        if graphed:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                forward = torch.cuda.make_graphed_callables(model, (images,))
            model.load_state_dict(start)  # the capture updated running statistics
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[graphed] = []
        for _ in range(6):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(forward(images).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses[graphed].append(loss.item())
        model.eval()
        assert model(images[:3]).shape == (3, 8)  # evaluation is not captured: any batch size
    assert losses[True][-1] < losses[True][0]
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
