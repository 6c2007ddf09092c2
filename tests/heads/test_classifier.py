"""The pixel classifier of dense heads."""

import torch

from saccade.heads.classifier import PixelClassifier


def test_classifier_is_a_linear_layer_per_pixel():
    torch.manual_seed(0)
    classifier = PixelClassifier(6, 3).eval()
    features = torch.randn(2, 6, 4, 5)
    expected = features.movedim(1, -1) @ classifier.fc.weight.flatten(1).T + classifier.fc.bias
    torch.testing.assert_close(classifier(features), expected.movedim(-1, 1))


def test_classifier_starts_with_small_weights_and_zero_bias():
    torch.manual_seed(0)
    classifier = PixelClassifier(256, 150)
    assert abs(classifier.fc.weight.std().item() - 0.01) < 1e-4
    assert not classifier.fc.bias.any()


def test_dropout_removes_whole_channels_in_training():
    torch.manual_seed(0)
    classifier = PixelClassifier(64, 3, dropout=0.5).train()
    dropped = classifier.drop(torch.ones(8, 64, 4, 4)).flatten(2)
    assert (dropped == dropped[..., :1]).all()  # a channel is constant
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
