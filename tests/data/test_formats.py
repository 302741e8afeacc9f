"""Every published form of every data set decodes to the same arrays, and damage to any of them is noticed."""

import io
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from feddpc import data
from feddpc.data import fetch
from feddpc.data.dataset import FIELDS
from feddpc.data.fetch import idx
from feddpc.data.specs import SPECS, Archive
from feddpc.errors import DataError


def same(a, b):
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)


def image(array, form="PNG"):
    out = io.BytesIO()
    Image.fromarray(array).save(out, form)
    return out.getvalue()


CIFAR_FORMS = [
    ("cifar10", "binary"),
    ("cifar10", "npm"),
    ("cifar100", "binary"),
]


@pytest.mark.parametrize("container", ["tar", "zip", "folder"])
@pytest.mark.parametrize(("name", "form"), CIFAR_FORMS)
def test_cifar_in_every_form(tmp_path, small, register, cifar_files, write, name, form, container):
    spec, made = small(name)
    register(spec)
    path = write[container](cifar_files(made, form), tmp_path / "source")
    fetch.get(name, path)
    same(data.load(name), made)
    assert data.load(name).y_train.dtype == np.int64


def test_cifar_from_npz_is_checked_like_any_other(tmp_path, small, register):
    spec, made = small("cifar10")
    register(spec)
    arrays = {field: getattr(made, field) for field in FIELDS}
    np.savez(tmp_path / "good.npz", **arrays)
    np.savez(tmp_path / "bad.npz", **arrays | {"x_train": made.x_train[::-1]})
    fetch.get("cifar10", tmp_path / "good.npz")
    same(data.load("cifar10"), made)
    with pytest.raises(DataError, match="md5 of x_train"):
        fetch.get("cifar10", tmp_path / "bad.npz")


def test_the_wrong_cifar_says_what_it_lacks(tmp_path, small, register, cifar_files, write):
    spec, _ = small("cifar10")
    _, hundred = small("cifar100")
    path = write["tar"](cifar_files(hundred, "binary"), tmp_path / "c.tar.gz")
    with pytest.raises(DataError, match="is not cifar10: it lacks data_batch_1"):
        fetch.from_path(spec, path)


@pytest.mark.parametrize(
    ("name", "files"),
    [("cifar10", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]), ("cifar100", ["train", "test", "meta"])],
)
def test_the_pickled_version_is_refused_with_the_address_of_the_binary_one(tmp_path, write, name, files):
    path = write["tar"]({f"cifar-py/{file}": b"a pickle" for file in files}, tmp_path / "c.tar.gz")
    with pytest.raises(DataError, match=rf"`feddpc data get {name}`.*cifar-100?-binary\.tar\.gz"):
        fetch.get(name, path)
    with pytest.raises(DataError, match="`feddpc data get NAME --from PATH`"):
        data.load(path)


def test_two_copies_in_one_folder_are_ambiguous(tmp_path, small, cifar_files, write):
    spec, made = small("cifar10")
    files = cifar_files(made, "binary")
    write["folder"](files | {f"copy/{name.split('/')[1]}": content for name, content in files.items()}, tmp_path / "f")
    with pytest.raises(DataError, match="same file more than once"):
        fetch.from_path(spec, tmp_path / "f")


@pytest.mark.parametrize("form", ["binary", "npm"])
def test_a_flipped_byte_anywhere_is_noticed_and_nothing_is_cached(
    tmp_path, cache, small, register, cifar_files, write, form
):
    spec, made = small("cifar10")
    register(spec)
    content = write["tar"](cifar_files(made, form), tmp_path / "whole").read_bytes()
    # From byte 20 on: the header of gzip holds a time and a file name that nobody reads.
    for position in np.linspace(20, len(content) - 1, 25).astype(int):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        (tmp_path / "damaged.tar.gz").write_bytes(damaged)
        with pytest.raises(DataError):
            fetch.get("cifar10", tmp_path / "damaged.tar.gz")
    assert not list(cache.rglob("*.npy"))


@pytest.mark.parametrize("container", ["tar", "zip"])
def test_a_truncated_archive_is_noticed(tmp_path, cache, small, register, cifar_files, write, container):
    spec, made = small("cifar10")
    register(spec)
    content = write[container](cifar_files(made, "binary"), tmp_path / "whole").read_bytes()
    for share in (0.0, 0.01, 0.5, 0.9, 0.999):
        (tmp_path / "cut").write_bytes(content[: int(share * len(content))])
        with pytest.raises(DataError):
            fetch.get("cifar10", tmp_path / "cut")
    assert not list(cache.rglob("*.npy"))


def test_swapped_labels_are_noticed_by_the_class_balance(tmp_path, small, cifar_files, write):
    spec, made = small("cifar10")
    y = made.y_train.copy()
    y[0] = (y[0] + 1) % 10
    path = write["folder"](cifar_files(replace(made, y_train=y), "binary"), tmp_path / "f")
    with pytest.raises(DataError, match="train samples of class"):
        fetch.from_path(spec, path)


def test_a_failure_of_a_file_with_an_official_name_tells_its_md5(tmp_path, small):
    spec, _ = small("cifar10")
    spec = replace(spec, archives=(Archive("cifar-10-binary.tar.gz", "c58f", "http://example.org"),))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"not an archive")
    with pytest.raises(DataError, match=r"md5 of .*cifar-10-binary\.tar\.gz is [0-9a-f]{32}, .* official .* c58f"):
        fetch.from_path(spec, tmp_path / "cifar-10-binary.tar.gz")


@pytest.mark.parametrize("name", ["../data_batch_1", "/etc/data_batch_1", "a/../../data_batch_1", "C:\\data_batch_1"])
@pytest.mark.parametrize("container", ["tar", "zip"])
def test_members_that_point_outside_are_refused(tmp_path, small, cifar_files, write, container, name):
    spec, made = small("cifar10")
    path = write[container](cifar_files(made, "binary") | {name: b"evil"}, tmp_path / "a")
    with pytest.raises(DataError, match="points outside the archive"):
        fetch.from_path(spec, path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_refused(tmp_path, small, kind):
    spec, _ = small("cifar10")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("c/data_batch_1")
        link.type, link.linkname = kind, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match="is a link"):
        fetch.from_path(spec, tmp_path / "a.tar")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("container", ["tar", "zip", "folder"])
def test_fashion_mnist_from_idx_files(tmp_path, small, register, idx_files, write, container, zipped):
    spec, made = small("fashion-mnist")
    register(spec)
    path = write[container](idx_files(made, zipped), tmp_path / "idx")
    fetch.get("fashion-mnist", path)
    got = data.load("fashion-mnist")
    same(got, made)
    assert got.class_names is not None
    assert got.class_names[9] == "Ankle boot"


def test_a_missing_idx_file_is_named(tmp_path, small, idx_files, write):
    spec, made = small("fashion-mnist")
    folder = write["folder"](idx_files(made), tmp_path / "idx")
    (folder / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(DataError, match="lacks the IDX files t10k-images"):
        fetch.from_path(spec, folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "not an IDX file of bytes"),
        (b"\0\0\x08\x03\0\0", "its header"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "its header"),
        (b"\0\0\x08\x03" + b"\xff" * 12 + b"abc", "its header"),
        (b"\x1f\x8bnonsense", "damaged or truncated"),
    ],
)
def test_a_bad_idx_file_says_why(content, message):
    with pytest.raises(DataError, match=message):
        idx.parse(content, "file")


def tiny_spec(classes=200):
    return replace(SPECS["tiny-imagenet"], classes=classes, train=2 * classes, test=classes)


@pytest.mark.parametrize("container", ["zip", "folder"])
def test_tiny_imagenet(tmp_path, register, tiny_files, write, container):
    register(tiny_spec())
    path = write[container](tiny_files(), tmp_path / "tiny")
    fetch.get("tiny-imagenet", path)
    got = data.load("tiny-imagenet")
    assert got.x_train.shape == (400, 64, 64, 3)
    assert got.class_names == tuple(sorted(got.class_names or ()))
    # The forgery paints class i of wnids.txt in grey level i, and lists the ids in descending order.
    level = 199 - got.y_train
    np.testing.assert_array_equal(got.x_train, np.broadcast_to(level[:, None, None, None], got.x_train.shape))
    np.testing.assert_array_equal(got.x_test[:, 5, 5, 1], 199 - got.y_test)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update({"t/wnids.txt": f["t/wnids.txt"][:-10]}), "lists 2 classes, but Tiny ImageNet has 3"),
        (
            lambda f: [f.pop(n) for n in list(f) if n.startswith("t/train/n00008999")],
            "disagree on 1 .* n00008999",
        ),
        (lambda f: f.update({"t/train/n7/images/n7_0.JPEG": b""}), "disagree on 1 classes, such as n7"),
        (lambda f: f.pop("t/val/images/val_1.JPEG"), "disagree on t/val/images/val_1.JPEG"),
        (lambda f: f.update({"t/val/images/val_9.JPEG": b""}), "disagree on t/val/images/val_9.JPEG"),
        (lambda f: f.pop("t/val/val_annotations.txt"), "lacks t/val/val_annotations.txt"),
        (
            lambda f: f.update({"t/val/val_annotations.txt": b"val_0.JPEG\tn1\t0"}),
            "disagree on t/val/images/val_0.JPEG",
        ),
        (lambda f: f.update({"t/val/images/val_2.JPEG": b"\xff\xd8junk"}), "val_2.JPEG is not a readable image"),
        (
            lambda f: f.update({"t/val/images/val_2.JPEG": image(np.zeros((9, 7, 3), np.uint8))}),
            "val_2.JPEG is 7x9 pixels",
        ),
    ],
)
def test_an_incomplete_tiny_imagenet_says_what_is_wrong(tmp_path, tiny_files, write, change, message):
    files = tiny_files(3)
    change(files)
    with pytest.raises(DataError, match=message):
        fetch.from_path(tiny_spec(3), write["zip"](files, tmp_path / "t.zip"))


def folder_files(channels=3, side=6):
    rng = np.random.default_rng(1)
    files, arrays = {}, {}
    for part, count in (("train", 3), ("test", 2)):
        for name in ("wolf", "cat"):
            for i in range(count):
                array = rng.integers(0, 256, (side, side + 1, channels), dtype=np.uint8)
                arrays[f"{part}/{name}/{i}.png"] = array
                files[f"{part}/{name}/{i}.png"] = image(array.squeeze())
    return files, arrays


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("container", "prefix"), [("folder", ""), ("zip", ""), ("zip", "pets/")])
def test_a_folder_of_images(tmp_path, write, channels, container, prefix):
    files, arrays = folder_files(channels)
    path = write[container]({prefix + name: content for name, content in files.items()}, tmp_path / "pets")
    got = data.load(path)
    assert got.class_names == ("cat", "wolf")
    assert got.sample_shape == (6, 7, channels)
    assert got.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(got.x_train[4], arrays["train/wolf/1.png"])
    np.testing.assert_array_equal(got.x_test[1], arrays["test/cat/1.png"])


def test_grey_among_coloured_images_becomes_rgb(tmp_path, write):
    files, _ = folder_files(3)
    grey = np.arange(42, dtype=np.uint8).reshape(6, 7)
    files["train/cat/0.png"] = image(grey)
    got = data.load(write["folder"](files, tmp_path / "pets"))
    np.testing.assert_array_equal(got.x_train[0], np.stack([grey] * 3, axis=-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/cat/2.png": image(np.zeros((5, 5, 3), np.uint8))}, r"train/cat/2.png is 5x5 pixels but .* is 7x6"),
        ({"test/dog/0.png": image(np.zeros((6, 7, 3), np.uint8))}, "only in train: none; only in test: dog"),
        ({"train/wolf/1.png": b"text"}, "train/wolf/1.png is not a readable image"),
        ({"train/wolf/1.png": image(np.zeros((6, 7), np.uint16))}, "only 8-bit images"),
    ],
)
def test_a_bad_folder_of_images_names_the_file(tmp_path, write, change, message):
    files, _ = folder_files(3)
    with pytest.raises(DataError, match=message):
        data.load(write["folder"](files | change, tmp_path / "pets"))


def test_npz(tmp_path):
    x, y = np.ones((4, 2, 3), np.float32), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x * 2, y_test=y)
    got = data.load(str(tmp_path / "mine.npz"))
    assert (got.name, got.classes, got.sample_shape) == ("mine", 2, (2, 3))
    assert (got.x_test == 2).all()


def test_a_bad_npz_says_why(tmp_path):
    x, y = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    with pytest.raises(DataError, match="lacks x_test, y_test"):
        data.load(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x, y_test=np.array([{}, 1], object))
    with pytest.raises(DataError, match="plain arrays"):
        data.load(tmp_path / "b.npz")
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="not a readable"):
        data.load(tmp_path / "c.npz")
