"""SparseFormer v2 in the place of open_clip's image tower."""

import open_clip
import pytest
import torch
import torch.nn.functional as F

from saccade.models.sparseformer import clip_vision

SMALL = {"focus_dim": 64, "cortex_dim": 64, "depth": 1, "repeats": 1}


def test_clip_vision_refuses_a_classifier():
    with pytest.raises(ValueError, match="aligned with CLIP"):
        clip_vision("sparseformer_btsp_augreg_base", pretrained=False)


def test_clip_vision_is_a_drop_in_visual_of_open_clip():
    torch.manual_seed(0)
    text = {"context_length": 8, "vocab_size": 32, "width": 32, "heads": 2, "layers": 1}
    vision = {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16}
    clip = open_clip.CLIP(512, vision, text).eval()
    clip.visual = clip_vision("sparseformer_btsp_clip_base", pretrained=False, **SMALL).eval()
    images = torch.rand(2, 3, 64, 64)
    tokens = torch.randint(32, (3, 8))
    with torch.no_grad():
        image, words, scale = clip(images, tokens)
        expected = F.normalize(clip.visual(images), dim=-1)
    assert clip.visual(images).shape == (2, 512)
    torch.testing.assert_close(image, expected)
    assert (image @ words.T * scale).shape == (2, 3)
    config = open_clip.model.get_model_preprocess_cfg(clip)
    assert tuple(config["size"]) == (224, 224)
    assert tuple(config["mean"]) == (0.48145466, 0.4578275, 0.40821073)
    clip.set_grad_checkpointing(True)
    clip.lock_image_tower()
    assert not any(parameter.requires_grad for parameter in clip.visual.parameters())
