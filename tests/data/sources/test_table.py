"""Images in Parquet files and in Hugging Face datasets saved to disk."""

import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from saccade.data.decode.image import BadImage
from saccade.data.sources import table
from saccade.data.sources.base import DataError
from saccade.data.sources.table import TableSource, choose_column, saved_dataset_files
from tests.data.image_files import grey, png, write_parquet


def test_rows_of_several_files_are_concatenated(tmp_path):
    files = [
        write_parquet(tmp_path / "0.parquet", [0, 1, 0], ["first", "second"], [5, 6, 7]),
        write_parquet(tmp_path / "1.parquet", [1, 1], ["first", "second"], [8, 9]),
    ]
    source = TableSource(files)
    assert source.classes == ["first", "second"]
    assert source.labels.tolist() == [0, 1, 0, 1, 1]
    assert [grey(source, i) for i in (4, 0, 1, 2, 3)] == [9, 5, 6, 7, 8]
    assert source.name(4) == f"{tmp_path}, row 4"
    assert TableSource(files[:1]).name(2) == f"{files[0]}, row 2"


def test_string_labels_are_indexed_in_sorted_order_and_images_may_be_plain_bytes(tmp_path):
    rows = pa.table({"img": pa.array([png(1), png(2), png(3)]), "label": ["cat", "ant", "cat"]})
    pq.write_table(rows, tmp_path / "all.parquet")
    source = TableSource([tmp_path / "all.parquet"])
    assert source.classes == ["ant", "cat"]
    assert source.labels.tolist() == [1, 0, 1]
    assert grey(source, 2) == 3
    assert TableSource([tmp_path / "all.parquet"], classes=["cat", "bee", "ant"]).labels.tolist() == [0, 2, 0]
    with pytest.raises(DataError, match="not in the training set: ant"):
        TableSource([tmp_path / "all.parquet"], classes=["cat"])


def test_images_may_be_paths_relative_to_the_file(tmp_path):
    (tmp_path / "a.png").write_bytes(png(77))
    struct = pa.struct([("bytes", "binary"), ("path", "string")])
    rows = [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": None}]
    pq.write_table(pa.table({"image": pa.array(rows, struct), "label": [0, 1]}), tmp_path / "all.parquet")
    source = TableSource([tmp_path / "all.parquet"])
    assert grey(source, 0) == 77
    with pytest.raises(BadImage, match="row 1: the row has no image"):
        source.read(1)


def test_large_parquet_files_are_converted_to_arrow_once(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MAX_IN_MEMORY", 0)
    monkeypatch.setenv("SACCADE_HOME", str(tmp_path / "cache"))
    path = write_parquet(tmp_path / "train.parquet", [0, 1, 0, 1, 1], ["a", "b"], [3, 4, 5, 6, 7])
    converted = []
    for _ in range(2):
        source = TableSource([path])
        assert [grey(source, i) for i in (4, 0, 2)] == [7, 3, 5]
        (file,) = (tmp_path / "cache/arrow").iterdir()
        converted.append((file.name, file.stat().st_mtime_ns))
    assert converted[0] == converted[1]


def test_source_survives_pickling_after_use(tmp_path):
    source = TableSource([write_parquet(tmp_path / "a.parquet", [0, 1], ["a", "b"], [3, 4])])
    assert grey(source, 0) == 3
    copy = pickle.loads(pickle.dumps(source))
    assert copy._images._cells is None, "pickled without the Arrow buffers"
    assert grey(copy, 1) == 4


def test_columns_are_chosen_by_request_then_metadata_then_name():
    struct = pa.struct([("bytes", "binary"), ("path", "string")])
    schema = pa.schema([("scan", struct), ("img", struct), ("y", "int64"), ("mask", struct)])
    assert choose_column(schema, "image", None) == "img"
    assert choose_column(schema, "image", "scan") == "scan"
    assert choose_column(schema, "label", None) == "y"
    assert choose_column(schema, "mask", None) == "mask"
    features = {"scan": {"_type": "Image"}, "y": {"_type": "ClassLabel"}}
    described = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    assert choose_column(described, "image", None) == "scan"
    with pytest.raises(DataError, match="expected a column 'photo', got scan, img, y, mask"):
        choose_column(schema, "image", "photo")
    with pytest.raises(DataError, match=r"no label column among scan, img\. .*data\.label_column=NAME"):
        choose_column(pa.schema([("scan", struct), ("img", struct)]), "label", None)


@pytest.mark.parametrize(
    ("labels", "message"),
    [([None, 1], "1 rows of .* have no label"), ([0.5, 1.5], "string or lists of them in .*, got double")],
)
def test_unusable_labels_raise(tmp_path, labels, message):
    with pytest.raises(DataError, match=message):
        TableSource([write_parquet(tmp_path / "a.parquet", labels)])


def test_damaged_file_raises(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 broken")
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet"):
        TableSource([tmp_path / "a.parquet"])


def test_dataset_saved_with_indices_mapping_raises(tmp_path):
    state = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"flatten_indices\(\)"):
        saved_dataset_files(tmp_path)


CLASS_LABEL = {"_type": "ClassLabel", "names": ["cat", "dog", "fox"]}


@pytest.mark.parametrize(
    "feature",
    [{"_type": "Sequence", "feature": CLASS_LABEL}, {"_type": "List", "feature": CLASS_LABEL}, [CLASS_LABEL]],
)
def test_lists_of_class_labels_are_multi_hot(tmp_path, feature):
    labels = pa.array([[0, 2], [], [2]], pa.list_(pa.int64()))
    metadata = json.dumps({"info": {"features": {"image": {"_type": "Image"}, "kinds": feature}}})
    images = [{"bytes": png(i), "path": None} for i in range(3)]
    rows = pa.table({"image": images, "label": [0, 0, 0], "kinds": labels})
    pq.write_table(rows.replace_schema_metadata({"huggingface": metadata}), tmp_path / "a.parquet")
    source = TableSource([tmp_path / "a.parquet"])
    assert (source.label_column, source.classes) == ("kinds", ["cat", "dog", "fox"])
    assert source.labels.astype(int).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 1]]
    assert grey(source, 2) == 2


@pytest.mark.parametrize(
    ("kind", "labels", "classes"),
    [
        (pa.list_(pa.string()), [["b", "a"], ["c"]], ["a", "b", "c"]),
        (pa.large_list(pa.int32()), [[1, 0], [2]], ["0", "1", "2"]),
        (pa.list_(pa.int64(), 2), [[1, 0], [2, 2]], ["0", "1", "2"]),
    ],
)
def test_lists_of_names_or_indices_are_multi_hot(tmp_path, kind, labels, classes):
    source = TableSource([write_parquet(tmp_path / "a.parquet", pa.array(labels, kind))])
    assert source.classes == classes
    assert source.labels.astype(int).tolist() == [[1, 1, 0], [0, 0, 1]]


def test_unusable_label_lists_raise(tmp_path):
    lists = pa.array([[0, 3]], pa.list_(pa.int64()))
    with pytest.raises(DataError, match=r"expected labels from 0 to 1 in .*, got 3"):
        TableSource([write_parquet(tmp_path / "a.parquet", lists)], classes=["a", "b"])
    with pytest.raises(DataError, match=r"integer, string or lists of them in .*, got list<.*double"):
        TableSource([write_parquet(tmp_path / "b.parquet", pa.array([[0.5]]))])
    with pytest.raises(DataError, match=r"1 rows of .* have no label"):
        TableSource([write_parquet(tmp_path / "c.parquet", pa.array([[0], None]))])
