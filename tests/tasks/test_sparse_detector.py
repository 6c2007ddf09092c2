"""SparseFormer as a detector (appendix A.1): initial tokens, boxes, losses."""

import numpy as np
import pytest
import torch

import saccade
from saccade.layers.boxes import adjust
from saccade.tasks.set_prediction import gather_targets, match_predictions, set_losses
from saccade.tasks.sparse_detector import init_detection_tokens
from tests.heads.small_detectors import crowd, fill_zero_parameters, make_target, random_images, zero_gradients

SIZE, OTHER_SIZE = (64, 64), (48, 96)


def make_detector(**options):
    torch.manual_seed(0)
    settings = dict(num_tokens=20, detect_tokens=12, min_size=64, max_size=128) | options
    return saccade.create_detector("sparseformer_nano", "sparse", 3, **settings)


@pytest.mark.shows("SF-67")
def test_tokens_start_uniform_over_the_image():
    """400 tokens: normal embeddings, centres uniform on [0, 1], regions of half the image."""
    torch.manual_seed(0)
    model = saccade.create_model("sparseformer_nano", num_classes=0, num_tokens=400)
    init_detection_tokens(model)
    regions = model.regions.detach()
    centre, side = (regions[:, :2] + regions[:, 2:]) / 2, regions[:, 2:] - regions[:, :2]
    torch.testing.assert_close(side, torch.full_like(side, 0.5))
    assert centre.min() >= 0
    assert centre.max() <= 1
    assert np.histogram(centre.numpy(), 4, (0, 1))[0].min() > 150  # 200 expected
    embeddings = model.embeddings.detach()
    assert abs(embeddings.mean().item()) < 0.02
    assert abs(embeddings.std().item() - 1) < 0.02


@pytest.mark.shows("SF-68")
def test_box_is_the_final_region_adjusted_once_more():
    model = make_detector().eval()
    batch, _ = model.transform(random_images(SIZE))
    with torch.no_grad():
        tokens, regions = model.forward_tokens(batch)
        logits, boxes = model.head(tokens, regions)
        assert logits.shape == (1, 12, 4)
        torch.testing.assert_close(boxes, regions[:, :12])
        model.head.to_delta[2].bias.copy_(torch.tensor([0.5, 0.0, 0.0, 1.0]))
        _, moved = model.head(tokens, regions)
        torch.testing.assert_close(moved, adjust(boxes, torch.tensor([0.5, 0.0, 0.0, 1.0]).expand_as(boxes)))


@pytest.mark.shows("SF-67")
def test_every_token_predicts_one_box_without_suppression():
    """Twelve equal boxes stay twelve."""
    model = make_detector().eval()
    with torch.no_grad():
        model.backbone.regions.copy_(torch.tensor([0.25, 0.25, 0.75, 0.75]).expand(20, 4))
        predictions = model(random_images(SIZE, OTHER_SIZE))
    for prediction, (height, width) in zip(predictions, (SIZE, OTHER_SIZE), strict=True):
        expected = torch.tensor([0.25 * width, 0.25 * height, 0.75 * width, 0.75 * height])
        torch.testing.assert_close(prediction["boxes"], expected.expand(12, 4))
        assert (prediction["scores"].diff() <= 0).all()
        assert set(prediction["labels"].tolist()) <= {1, 2, 3}


def test_decode_takes_the_best_class_clips_and_sorts():
    model = make_detector(score_thresh=0.2).eval()
    probabilities = torch.tensor(
        [[0.1, 0.6, 0.2, 0.1], [0.1, 0.1, 0.0, 0.8], [0.9, 0.1, 0.0, 0.0], [0.1, 0.9, 0.0, 0.0]]
    )
    boxes = torch.tensor([[-0.5, 0.0, 0.5, 0.5], [0.5, 0.5, 1.5, 1.0], [0.0, 0.0, 1.0, 1.0], [1.2, 0.0, 1.4, 1.0]])
    prediction = model.decode(probabilities.clamp(min=1e-9).log(), boxes, (40, 80))
    assert prediction["labels"].tolist() == [3, 1]  # the third is below the threshold, the fourth outside the image
    torch.testing.assert_close(prediction["scores"], torch.tensor([0.8, 0.6]))
    torch.testing.assert_close(prediction["boxes"], torch.tensor([[40.0, 20, 80, 40], [0, 0, 40, 20]]))


def test_regions_are_relative_to_the_image_not_to_the_padded_batch():
    model = make_detector(min_size=64).eval()
    with torch.no_grad():
        moving = [p for name, p in model.backbone.focus.named_parameters() if name.endswith("adjuster.to_delta.weight")]
        assert len(moving) == 1
        for parameter in (*moving, model.head.to_delta[2].weight):
            torch.nn.init.normal_(parameter, std=0.2)
        small, large = random_images((64, 64), (64, 128))

        def boxes(images: list) -> torch.Tensor:
            """(P, 4) of the first image, in units of it, in token order."""
            batch, _ = model.transform(images)
            return model.head(*model.forward_tokens(batch))[1][0]

        initial = model.backbone.regions[: len(boxes([small]))]
        moved, difference = (boxes([small]) - initial).abs().mean(), (boxes([small]) - boxes([small, large])).abs()
    # Tokens sample zeros beyond the image when alone and padding when not. In units of the batch, which is twice as
    # wide, boxes would differ by half of themselves.
    assert moved > 0.05
    assert difference.median() < 0.02
    assert difference.mean() < moved / 5


@pytest.mark.parametrize("auxiliary", [False, True])
def test_losses_reach_every_parameter(auxiliary):
    model = fill_zero_parameters(make_detector(auxiliary=auxiliary)).train()
    targets = [
        make_target([[4, 4, 40, 40]], [2], SIZE),
        make_target([], [], OTHER_SIZE),
        make_target(crowd(), [1] * 100, SIZE),
    ]
    losses = model(random_images(SIZE, OTHER_SIZE, SIZE), targets)
    names = ("loss_classifier", "loss_box_reg", "loss_giou")
    earlier = {f"{name}_{i}" for name in names for i in range(5)} if auxiliary else set()  # six blocks of the cortex
    assert set(losses) == set(names) | earlier
    assert zero_gradients(model, losses) == []


def spread_predictions(model):
    """Random weights of the last block and of the head, so that predictions and matchings differ between blocks."""
    with torch.no_grad():
        for parameter in model.backbone.cortex.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.2)
        torch.nn.init.normal_(model.head.to_delta[2].weight, std=0.5)
        torch.nn.init.normal_(model.head.to_class.weight, std=1.0)
    return model


@pytest.mark.shows("SF-69")
def test_auxiliary_losses_are_matched_per_layer():
    """DETR matches every decoder layer anew; the matching of the last layer would give other losses."""
    model = spread_predictions(make_detector(auxiliary=True)).train()
    boxes = [[4.0, 4, 40, 40], [20, 10, 60, 44], [8, 30, 30, 60]]
    image, target = random_images(SIZE)[0], make_target(boxes, [2, 1, 3], SIZE)
    losses = model([image], [target])
    with torch.no_grad():
        batch, _ = model.transform([image])
        passes: list[torch.Tensor] = []
        tokens, regions = model.forward_tokens(batch, passes)
        labels, true_boxes = [target["labels"]], [target["boxes"] / 64]
        assert torch.equal(tokens, passes[-1])
        last = match_predictions(*model.head(tokens, regions), labels, true_boxes)
        differing = 0
        for i, earlier in enumerate(passes[-6:-1]):
            outputs = model.head(earlier, regions)
            own = match_predictions(*outputs, labels, true_boxes)
            differing += any(not torch.equal(a, b) for a, b in zip(own[0], last[0], strict=True))
            expected = set_losses(*outputs, gather_targets(own, labels, true_boxes))
            for name, value in expected.items():
                torch.testing.assert_close(losses[f"{name}_{i}"], value, rtol=1e-4, atol=1e-5)
    assert differing >= 1  # else this test could not tell one matching from the other


def test_high_threshold_gives_empty_prediction():
    with torch.no_grad():
        (prediction,) = make_detector(score_thresh=0.999).eval()(random_images(SIZE))
    assert prediction["boxes"].shape == (0, 4)
    assert prediction["scores"].shape == prediction["labels"].shape == (0,)


def test_more_detecting_tokens_than_tokens_are_refused():
    with pytest.raises(ValueError, match=r"^detect_tokens \(12\) must not exceed num_tokens \(8\)\.$"):
        make_detector(num_tokens=8, detect_tokens=12)


def test_training_without_targets_is_refused():
    with pytest.raises(ValueError, match=r"expected one target per image \(1\), got none"):
        make_detector().train()(random_images(SIZE))


def test_classifier_checkpoint_keeps_the_initial_detection_tokens(tmp_path):
    torch.manual_seed(0)
    trained = saccade.create_model("sparseformer_nano", num_classes=5)  # 36 tokens
    saccade.save_checkpoint(trained, tmp_path / "s.safetensors")
    model = make_detector(checkpoint=tmp_path / "s.safetensors")
    assert model.backbone.embeddings.shape == (20, 128)
    for name, value in model.backbone.state_dict().items():
        if name not in ("embeddings", "regions"):
            assert torch.equal(value, trained.state_dict()[name]), name


def test_regions_of_every_pass_are_reported():
    model = make_detector().eval()
    with torch.no_grad(), saccade.record(model) as traces:
        model(random_images(SIZE))
    assert [trace.regions.shape for trace in traces] == [(1, 20, 4)] * 5  # four passes of focusing, one of the cortex
