"""Archives that want out, or want to fill the memory: refused by every reader, and nothing is written anywhere."""

import gzip
import io
import os
import stat
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from feddpc.data import fetch
from feddpc.data.fetch import idx, images
from feddpc.data.fetch.archive import list_files, read_files
from feddpc.data.untrusted import read_npz
from feddpc.errors import DataError

OUTSIDE = ["../x", "a/../../x", "/etc/x", "\\x", "..\\x", "C:\\x", "C:x"]
#: No reader may hold more than this at a time, however much an archive says it holds.
MOST = 300 << 20
ZEROS = bytes(8 << 20)


@pytest.fixture(autouse=True)
def little_memory():
    """Every test here is measured."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST


@pytest.fixture
def readers(small):
    """What reads archives: each as a function of the path."""
    specs = {name: small(name)[0] for name in ("cifar10", "fashion-mnist", "tiny-imagenet")}
    known = {name: lambda path, spec=spec: fetch.from_path(spec, path) for name, spec in specs.items()}
    return known | {"images": images.decode, "any": lambda path: list_files(path)}


READERS = ("cifar10", "fashion-mnist", "tiny-imagenet", "images", "any")


def tar(path, *members, mode="w"):
    with tarfile.open(path, mode) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def member(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    ("reader", "name"), [*(("any", name) for name in OUTSIDE), *((r, "../x") for r in READERS[:-1])]
)
@pytest.mark.parametrize("container", ["tar", "zip"])
def test_a_way_out_is_refused(tmp_path, readers, write, reader, name, container):
    (tmp_path / "inner").mkdir()
    path = write[container]({"train/a/0.png": b"", name: b"evil"}, tmp_path / "inner" / "a")
    with pytest.raises(DataError, match="points outside the archive"):
        readers[reader](path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.GNUTYPE_SPARSE])
def test_links_and_sparse_files_in_a_tar_are_refused(tmp_path, readers, reader, kind):
    path = tar(tmp_path / "a.tar", (member("train/a/0.png", kind, "/etc/passwd"), b""))
    with pytest.raises(DataError, match=r"is a link|is sparse"):
        readers[reader](path)


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE])
def test_devices_and_pipes_in_a_tar_are_not_there(tmp_path, kind):
    device = member("train/a/0.png", kind)
    device.devmajor, device.devminor = 1, 5  # an endless source of zeros
    path = tar(tmp_path / "a.tar", (device, b""), (member("b"), b"content"))
    names = list_files(path)
    assert "b" in names
    assert dict(read_files(path, names))["b"] == b"content"
    assert dict(read_files(path, names)).get("train/a/0.png", b"") == b""


def test_a_link_in_a_zip_is_text_and_nothing_is_followed(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        link = zipfile.ZipInfo("train/a/0.png")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    path = tmp_path / "a.zip"
    assert dict(read_files(path, list_files(path))) == {"train/a/0.png": b"/etc/passwd"}


def test_devices_and_pipes_in_a_folder_are_not_there(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "real").write_bytes(b"content")
    assert list_files(tmp_path) == ["real"]


def test_a_name_that_is_there_twice_is_refused(tmp_path):
    path = tar(tmp_path / "a.tar", (member("a"), b"1"), (member("a"), b"2"))
    with pytest.raises(DataError, match="two members have the name 'a'"):
        list_files(path)


# Bombs: much more comes out than went in.


def test_a_gzipped_idx_file_that_never_ends(tmp_path):
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(ZEROS) for _ in range(30)) + packer.flush()
    with pytest.raises(DataError, match="unpacks to more than"):
        idx.parse(bomb, "file")
    with pytest.raises(DataError, match="unpacks to more than"):
        idx.parse(gzip.compress(ZEROS) * 30, "file")


@pytest.mark.parametrize("reader", READERS)
def test_a_gzipped_tar_that_never_ends(tmp_path, readers, reader):
    head = member("train/a/0.png")
    head.size = 1 << 29
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(head.tobuf()) + gzip.compress(ZEROS) * 64)
    with pytest.raises(DataError, match="unpacks to more than"):
        readers[reader](tmp_path / "a.tar.gz")


@pytest.mark.parametrize(("reader", "name"), [("tiny-imagenet", "t/wnids.txt"), ("images", "train/a/0.png")])
def test_a_zip_whose_member_is_far_larger_than_itself(tmp_path, readers, tiny_files, reader, name):
    others = {"t/val/val_annotations.txt": b"", "t/train/a/images/a.JPEG": b"", "test/a/0.png": b""}
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in {name: ZEROS * 16, **others}.items():
            archive.writestr(file, content)
    with pytest.raises(DataError, match="unpacks to more than"):
        readers[reader](tmp_path / "a.zip")


def test_a_zip_that_lies_about_the_size_of_a_member(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", ZEROS)
    honest = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "b.zip").write_bytes(honest.replace(struct.pack("<I", len(ZEROS)), struct.pack("<I", 10)))
    names = list_files(tmp_path / "b.zip")
    with pytest.raises(DataError, match="damaged"):
        list(read_files(tmp_path / "b.zip", names))


def test_a_tar_member_that_claims_more_than_any_file_has(tmp_path):
    head = member("a")
    head.size = 1 << 40
    (tmp_path / "a.tar").write_bytes(head.tobuf() + bytes(1024))
    with pytest.raises(DataError):
        list(read_files(tmp_path / "a.tar", ["a"]))


def test_an_npz_that_is_far_larger_than_itself(tmp_path):
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "|u1", "fortran_order": False, "shape": (16 * len(ZEROS),)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", array.getvalue() + ZEROS)
            with archive.open(f"{name}_more.npy", "w") as rest:
                for _ in range(4):
                    rest.write(ZEROS)
    with pytest.raises(DataError, match="unpacks to more than"):
        read_npz(tmp_path / "a.npz")


def test_an_npz_whose_header_promises_a_terabyte(tmp_path):
    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f8", "fortran_order": False, "shape": (1 << 37,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", array.getvalue())
    with pytest.raises(DataError, match="its header claims"):
        read_npz(tmp_path / "a.npz")


def _png(width, height, rows):
    """A PNG that says it is ``width`` by ``height`` and holds so many rows of zeros."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (1 << 30, 1), (5000, 5000)])
def test_a_png_that_says_it_is_enormous(width, height):
    with pytest.raises(DataError, match=r"pixels|not a readable image"):
        images.pixels(_png(width, height, bytes(1000)), "file", "RGB")


def test_many_pngs_that_are_far_larger_than_they_look(tmp_path, write):
    """Each is within bounds; all together are not what so few bytes can hold."""
    picture = _png(1000, 1000, bytes(1001 * 1000))
    files = {f"{part}/a/{i}.png": picture for part in ("train", "test") for i in range(130)}
    with pytest.raises(DataError, match="unpacks to more than"):
        images.decode(write["folder"](files, tmp_path / "a"))
