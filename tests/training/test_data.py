"""The readers read the official formats, and say what is missing."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from dpaudit.errors import InputError
from dpaudit.training.data import (
    Dataset,
    cifar10,
    digits,
    idx_images,
    location,
    purchase100,
    random_images,
)


def write_cifar10(folder: Path, records: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        table = np.full((records, 3073), 10 * number, dtype=np.uint8)
        table[:, 0] = number
        table[:, 1:1025] = 255  # red
        table.tofile(folder / f"{name}.bin")


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar10_is_read_from_its_folder_or_the_one_above(tmp_path: Path, inner: str) -> None:
    write_cifar10(tmp_path / inner)
    train, test = cifar10(tmp_path), cifar10(tmp_path, train=False)
    assert repr(train) == "Dataset(15 examples of 3 x 32 x 32, 10 classes)"
    assert train.targets.tolist() == [i for i in range(5) for _ in range(3)]
    assert test.targets.tolist() == [5] * 3
    inputs, _ = train.at(torch.tensor([0]))
    assert inputs[0, :, 4, 7].tolist() == [1.0, -1.0, -1.0]


def test_a_missing_file_of_cifar10_is_named_with_its_source(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(InputError, match=r"has no data_batch_4.bin; download it from cifar-10-binary"):
        cifar10(tmp_path)


def test_a_file_of_cifar10_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"\0" * 4000)
    with pytest.raises(InputError, match=r"data_batch_2.bin has 4,000 bytes, .* records of 3,073 bytes"):
        cifar10(tmp_path)


def idx(values: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


@pytest.mark.parametrize(("end", "pack"), [("", bytes), (".gz", gzip.compress)])
@pytest.mark.parametrize("mark", ["-", "."])
def test_idx_files_are_read_gzipped_or_not(tmp_path: Path, end: str, pack: object, mark: str) -> None:
    images, labels = np.arange(4 * 6).reshape(4, 2, 3), np.asarray([3, 1, 0, 9])
    for stem, values in ((f"t10k-images{mark}idx3", images), (f"t10k-labels{mark}idx1", labels)):
        (tmp_path / f"{stem}-ubyte{end}").write_bytes(pack(idx(values)))  # type: ignore[operator]
    data = idx_images(tmp_path, train=False)
    assert data.shape == (1, 2, 3)
    assert data.targets.tolist() == [3, 1, 0, 9]
    assert data.inputs[1].flatten().tolist() == [6, 7, 8, 9, 10, 11]


def test_idx_files_that_are_missing_damaged_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no train-images-idx3-ubyte or train-images-idx3-ubyte.gz"):
        idx_images(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    images.write_bytes(gzip.compress(idx(np.zeros((2, 2, 2))))[:-9])
    with pytest.raises(InputError, match="truncated or damaged"):
        idx_images(tmp_path)
    images.write_bytes(idx(np.zeros((2, 2, 2)))[:-1])
    with pytest.raises(
        InputError, match=r"is truncated: shape \(2, 2, 2\) is declared, but there are 7 values"
    ):
        idx_images(tmp_path)
    images.write_bytes(idx(np.zeros(4)))
    with pytest.raises(InputError, match="an idx file of bytes with 3 dimensions"):
        idx_images(tmp_path)


def test_location_is_read_from_the_original_csv(tmp_path: Path) -> None:
    rows = [f'"{label}",' + ",".join("01"[i % 2] for i in range(446)) for label in (30, 1, 17)]
    (tmp_path / "bangkok").write_text("\n".join(rows) + "\n")
    data = location(tmp_path)
    assert repr(data) == "Dataset(3 examples of 446, 30 classes)"
    assert data.targets.tolist() == [29, 0, 16]
    assert data.inputs[0, :4].tolist() == [0, 1, 0, 1]
    assert data.inputs.dtype == torch.float32


@pytest.mark.parametrize("one_hot", [False, True])
def test_purchase100_is_read_from_an_npz(tmp_path: Path, one_hot: bool) -> None:
    labels = np.asarray([0, 99, 5])
    features = np.eye(3, 600)
    np.savez(
        tmp_path / "purchase100.npz", features=features, labels=np.eye(100)[labels] if one_hot else labels
    )
    data = purchase100(tmp_path)
    assert data.targets.tolist() == [0, 99, 5]
    assert torch.equal(data.inputs, torch.eye(3, 600))


def test_tables_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"purchase100.npz or .*; download it from dataset_purchase.tgz"):
        purchase100(tmp_path)
    path = tmp_path / "purchase100.csv"
    path.write_text("1,0,1\n")
    with pytest.raises(InputError, match=r"must have 600 features per record, got shape \(1, 2\)"):
        purchase100(tmp_path)
    path.write_text("1,a,1\n")
    with pytest.raises(InputError, match="must contain whole numbers, the class first"):
        purchase100(tmp_path)
    path.write_text("")
    with pytest.raises(InputError, match="is empty"):
        purchase100(tmp_path)
    np.savez(tmp_path / "purchase100.npz", data=np.zeros(3))
    with pytest.raises(InputError, match=r"has no array named features or inputs or x .found: data"):
        purchase100(tmp_path)


def test_the_digits_come_with_the_package() -> None:
    data = digits()
    assert (len(data), data.shape, data.num_classes) == (1797, (1, 8, 8), 10)
    assert (data.inputs.min().item(), data.inputs.max().item()) == (-1.0, 1.0)
    assert torch.bincount(data.targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_random_images_are_those_of_their_seed() -> None:
    first, again, other = (random_images(20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert first.shape == (3, 32, 32)


def test_a_split_keeps_every_example_once() -> None:
    first, rest = digits().split(1500)
    assert (len(first), len(rest)) == (1500, 297)
    with pytest.raises(InputError, match=r"num_first must be between 1 and 1796, got 1797"):
        digits().split(1797)


def test_classes_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match=r"whole numbers, got torch\.float32"):
        Dataset(torch.rand(5, 2), torch.rand(5), 2)
    with pytest.raises(InputError, match=r"Classes must be between 0 and 2, got 0 to 3"):
        Dataset(torch.zeros(4, 1), torch.arange(4), num_classes=3)
    with pytest.raises(InputError, match="got 3 inputs and 2 targets"):
        Dataset(torch.zeros(3, 1), torch.zeros(2), num_classes=3)
