"""`saccade.predict`: inputs, batches and typed results of every task."""

import json
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.data.decode.image import read_image
from saccade.data.decode.video import frames_every, write_video
from saccade.data.synthetic.motions import MotionSet
from saccade.data.synthetic.photos import photo_paths
from saccade.data.transforms.batch import normalize
from saccade.data.transforms.image import eval_transform
from saccade.tasks.load import card_of
from saccade.tasks.predict import PredictOptions, make_predictor, predict_logits, predict_stream
from saccade.tasks.results import Unreadable


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    return saccade.create_model("vt_nano", num_classes=7).eval()


@pytest.fixture(scope="module")
def segmenter():
    torch.manual_seed(0)
    return saccade.create_segmenter("vt_nano", "fpn", num_classes=5).eval()


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(0)
    sizes = {"min_size": 64, "max_size": 96}
    model = saccade.create_detector("svit_nano", "mask_rcnn", num_classes=3, box_score_thresh=0.0, **sizes)
    return model.eval()


@pytest.fixture(scope="module")
def photos():
    return [photo_paths()[name] for name in ("cat", "rocket", "coffee")]


def test_classification_is_the_softmax_of_the_centre_crop(classifier, photos):
    preprocess = card_of(classifier).preprocess
    transform = eval_transform(preprocess.size, preprocess.crop_pct, preprocess.interpolation)
    for result, photo in zip(saccade.predict(classifier, photos), photos, strict=True):
        pixels = normalize(transform(read_image(photo))[None].float() / 255, preprocess.mean, preprocess.std)
        with torch.no_grad():
            expected = classifier(pixels).softmax(1)[0].numpy()
        np.testing.assert_allclose(result.probabilities, expected, atol=1e-5)
        assert result.classes[0].index == expected.argmax()
        assert result.label == card_of(classifier).names[expected.argmax()]
        assert result.name == photo.name


def test_paths_arrays_tensors_and_images_give_the_same_result(classifier, photos):
    image = read_image(photos[0])
    array = np.array(image)
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    expected = saccade.predict(classifier, photos[0])[0].probabilities
    for source in (str(photos[0]), image, array, tensor, tensor.float() / 255):
        np.testing.assert_allclose(saccade.predict(classifier, source)[0].probabilities, expected, atol=1e-6)
    batch = saccade.predict(classifier, torch.stack([tensor, tensor]))
    assert [result.name for result in batch] == ["image", "image"]


def test_batch_size_does_not_change_results(classifier, photos):
    alone, batched = (saccade.predict(classifier, photos, batch_size=size) for size in (1, 3))
    for first, second in zip(alone, batched, strict=True):
        np.testing.assert_allclose(first.probabilities, second.probabilities, atol=1e-5)


def test_folder_is_read_in_order_and_unreadable_files_are_skipped(classifier, photos, tmp_path):
    for number, photo in enumerate(photos):
        (tmp_path / f"{number}.jpg").write_bytes(photo.read_bytes())
    (tmp_path / "1b.jpg").write_text("not an image")
    predictions = saccade.predict(classifier, tmp_path, batch_size=2)
    assert [result.name for result in predictions] == ["0.jpg", "1.jpg", "2.jpg"]
    assert [(entry.name, "not a readable image" in entry.error) for entry in predictions.skipped] == [("1b.jpg", True)]
    with pytest.raises(ValueError, match=r"none of the 1 inputs could be read: .*not a readable image"):
        saccade.predict(classifier, tmp_path / "1b.jpg")
    with pytest.raises(ValueError, match="expected at least one image, got none"):
        saccade.predict(classifier, [])


def test_stream_reads_lazily_and_keeps_the_order(classifier, photos):
    taken = []

    def sources():
        for i in range(40):
            taken.append(i)
            yield photos[0] if i % 5 else "missing.jpg"

    stream = predict_stream(make_predictor(classifier), sources(), batch_size=4)
    assert isinstance(next(stream), Unreadable)
    assert len(taken) == 8  # the batch and the one that is decoded ahead
    assert [isinstance(result, Unreadable) for result in stream] == [i % 5 == 0 for i in range(1, 40)]


def test_embedding_is_the_input_of_the_classifier(classifier, photos):
    result = saccade.predict(classifier, photos[0], embed=True)[0]
    with torch.no_grad():
        logits = classifier.get_classifier()(torch.from_numpy(result.embedding)[None])
    np.testing.assert_allclose(logits.softmax(1)[0].numpy(), result.probabilities, atol=1e-5)
    assert saccade.predict(classifier, photos[0])[0].embedding is None


def test_segmentation_has_the_size_of_the_image(segmenter, photos):
    images = [read_image(photo).resize((96, 64 + 16 * i)) for i, photo in enumerate(photos)]
    results = saccade.predict(segmenter, [*images, images[-1]])
    for image, result in zip(images, results, strict=False):
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
        preprocess = card_of(segmenter).preprocess
        with torch.no_grad():
            expected = segmenter(normalize(pixels, preprocess.mean, preprocess.std)).argmax(1)[0]
        assert np.array_equal(result.labels, expected.numpy())
        assert sum(row["share"] for row in result.areas()) == pytest.approx(1)
        assert result.draw().size == image.size
    assert np.array_equal(results[2].labels, results[3].labels)


def test_detections_are_sorted_and_thresholded(detector, photos):
    image = read_image(photos[0]).resize((96, 64))
    results = saccade.predict(detector, image, threshold=0.3)[0]
    everything = saccade.predict(detector, image, threshold=0.0)[0]
    scores = everything.scores.tolist()
    assert scores == sorted(scores, reverse=True)
    assert len(results) == sum(score >= 0.3 for score in scores) < len(everything)
    assert everything.masks.shape == (len(everything), 64, 96)
    entry = everything.to_dict()["objects"][0]
    assert entry["segmentation"]["size"] == [64, 96]
    assert everything.draw().size == (96, 64)


def test_detection_size_is_restored(detector, photos):
    before = detector.transform.min_size
    small = saccade.predict(detector, photos[0], size=32, threshold=0.0)[0]
    assert detector.transform.min_size == before
    large = saccade.predict(detector, photos[0], threshold=0.0)[0]
    assert not torch.equal(small.boxes, large.boxes)


def test_clip_prediction_averages_views():
    torch.manual_seed(0)
    model = saccade.create_model("video_sparseformer_nano", num_classes=4).eval()
    clips = [MotionSet(4, 64, 8).read(i).pixels for i in range(2)]
    results = saccade.predict(model, clips, views=(2, 1), size=64)
    assert [(result.frames, result.views) for result in results] == [(card_of(model).preprocess.frames, 2)] * 2
    assert results[0].probabilities.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.3}, "threshold applies to detection and multi-label models, not to classification"),
        ({"window": 64}, "window applies to segmentation"),
        ({"views": (4, 3)}, "views applies to video models"),
    ],
)
def test_options_of_other_tasks_are_refused(classifier, photos, options, message):
    with pytest.raises(ValueError, match=message):
        saccade.predict(classifier, photos[0], **options)
    with pytest.raises(TypeError, match="thresh"):
        saccade.predict(classifier, photos[0], thresh=0.1)


def test_results_are_saved_and_displayed(classifier, segmenter, detector, photos, tmp_path):
    image = read_image(photos[0]).resize((96, 64))
    for model in (classifier, segmenter, detector):
        folder = tmp_path / card_of(model).task
        predictions = saccade.predict(model, [image, image])
        document = json.loads(predictions.save(folder).read_text())
        names = [row["overlay"] for row in document["predictions"]]
        assert len(set(names)) == 2
        for name in names:
            assert Image.open(folder / name).width >= 96
        assert predictions[0].to_dict() == predictions[1].to_dict()
        with Image.open(BytesIO(predictions[0]._repr_png_())) as drawn:
            assert drawn.format == "PNG"
        assert predictions._repr_html_().count("<figure") == 2
        assert str(predictions[0]).startswith("image: ")
        single = predictions[0].save(folder / "one")
        assert (folder / "one" / "image.json").exists()
        assert all((folder / "one" / file).exists() for file in single.values())
        assert not list(folder.rglob(".*"))


def test_label_image_has_class_indices(segmenter, photos, tmp_path):
    result = saccade.predict(segmenter, photos[0])[0]
    files = result.save(tmp_path)
    assert np.array_equal(np.array(Image.open(tmp_path / files["labels"])), result.labels)


@pytest.fixture(scope="module")
def video(tmp_path_factory, photos):
    """Twelve frames at 4 per second: the cat for a second, the rocket, the coffee."""
    path = tmp_path_factory.mktemp("video") / "pets.mp4"
    frames = [np.asarray(read_image(photo).resize((96, 64))) for photo in photos for _ in range(4)]
    write_video(path, np.stack(frames), fps=4)
    return path


@pytest.mark.parametrize("model", ["classifier", "segmenter", "detector"])
def test_image_model_reads_frames_of_a_video_file(model, video, request):
    model = request.getfixturevalue(model)
    results = saccade.predict(model, video)
    assert [result.name for result in results] == ["pets-0.00s.mp4", "pets-1.00s.mp4", "pets-2.00s.mp4"]
    frames = [image for _, image in frames_every(video, 1.0)]
    for result, alone in zip(results, saccade.predict(model, frames), strict=True):
        assert result.to_dict() | {"image": ""} == alone.to_dict() | {"image": ""}
        assert np.array_equal(np.asarray(result.image), np.asarray(alone.image))


def test_every_sets_the_interval_and_is_refused_for_video_models(classifier, video):
    assert len(saccade.predict(classifier, [video, video], every=0.5)) == 12
    model = saccade.create_model("video_sparseformer_nano", num_classes=4)
    with pytest.raises(ValueError, match="every applies to image models"):
        saccade.predict(model, video, every=0.5)


def test_unreadable_video_says_why(classifier, photos, tmp_path):
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)))
    predictions = saccade.predict(classifier, [photos[0], tmp_path / "noise.mp4"])
    assert len(predictions) == 1
    assert "damaged, or not a video" in predictions.skipped[0].error


def test_urls_are_read_like_files(classifier, photos, video):
    for path in (photos[0], video):
        local = saccade.predict(classifier, path)
        remote = saccade.predict(classifier, path.as_uri())
        assert [result.to_dict() for result in remote] == [result.to_dict() for result in local]


def test_multi_label_model_has_a_probability_per_class(photos):
    torch.manual_seed(0)
    model = saccade.create_model("vt_nano", num_classes=4).eval()
    model.card = card_of(model)._replace(multi_label=True, classes=["a", "b", "c", "d"])
    with torch.no_grad():
        model.head.fc.bias.copy_(torch.tensor([3.0, -3.0, 3.0, -1.0]))
    plain, mirrored = saccade.predict(model, photos[0])[0], saccade.predict(model, photos[0], flip=True)[0]
    logits = predict_logits(model, make_predictor(model).read(photos[0]).pixels[None], model.card.preprocess)
    np.testing.assert_allclose(plain.probabilities, logits[0].detach().sigmoid().numpy(), atol=1e-5)
    assert plain.labels == ["a", "c"]
    assert plain.to_dict()["labels"] == ["a", "c"]
    assert saccade.predict(model, photos[0], threshold=0.01)[0].labels == ["a", "b", "c", "d"]
    image = read_image(photos[0]).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    expected = (plain.probabilities + saccade.predict(model, image)[0].probabilities) / 2
    np.testing.assert_allclose(mirrored.probabilities, expected, atol=1e-3)


def test_clip_in_memory_is_drawn_by_its_middle_frame():
    torch.manual_seed(0)
    model = saccade.create_model("video_sparseformer_nano", num_classes=4).eval()
    clip = np.stack([np.full((48, 64, 3), 20 * i, np.uint8) for i in range(9)])
    result = saccade.predict(model, clip, size=64)[0]
    assert np.asarray(result.image).mean() == 80
    assert result._repr_png_()[:4] == b"\x89PNG"


def test_saved_drawings_never_replace_each_other(classifier, tmp_path):
    for name in ("a/cat.png", "b/cat.png", "cat-2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64)).save(tmp_path / name)
    paths = [tmp_path / name for name in ("a/cat.png", "b/cat.png", "cat-2.png")]
    document = json.loads(saccade.predict(classifier, paths).save(tmp_path / "out").read_text())
    assert len({row["overlay"] for row in document["predictions"]}) == 3


def test_stream_takes_a_model_and_options(classifier, photos, tmp_path):
    stream = saccade.predict_stream(classifier, iter([photos[0], tmp_path / "none.png"]), top=2)
    result, missing = stream
    assert result == saccade.predict(classifier, photos[0], top=2)[0]
    assert isinstance(missing, saccade.Unreadable)


def test_options_are_the_documented_ones():
    assert PredictOptions._fields == (
        "size", "top", "embed", "views", "threshold", "window", "stride", "scales", "flip", "every",
    )  # fmt: skip


def test_threshold_of_a_multi_label_prediction_can_be_changed(photos):
    model = saccade.create_model("vt_nano", num_classes=2).eval()
    model.card = card_of(model)._replace(multi_label=True, classes=["a", "b"])
    prediction = saccade.predict(model, photos[0], threshold=0.0)[0]
    assert prediction.labels == ["a", "b"]
    assert prediction.above(1.0).labels == []
    assert str(prediction.above(1.0)).startswith(f"{photos[0].name}: no label (")
    single = saccade.predict(saccade.create_model("vt_nano", num_classes=2), photos[0])[0]
    with pytest.raises(ValueError, match="expected a prediction of a multi-label model"):
        single.above(0.5)
