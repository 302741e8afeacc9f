import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from feddpc.data import safe_pickle
from feddpc.errors import DataError


class Evil:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path):
    mark = tmp_path / "mark"
    content = pickle.dumps({b"data": Evil(os.system, f"touch {mark}")}, protocol=2)
    with pytest.raises(DataError, match=r"batch is a pickle that asks for (posix|nt)\.system"):
        safe_pickle.loads(content, "batch")
    assert not mark.exists()


@pytest.mark.parametrize("attack", [Evil(eval, "1"), Evil(Path, "x"), Evil(getattr, 1, "real"), Evil(np.load, "x")])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_every_other_global_is_refused(attack, protocol):
    with pytest.raises(DataError, match="asks for"):
        safe_pickle.loads(pickle.dumps(attack, protocol=protocol), "batch")


def test_dotted_names_cannot_reach_through_an_admitted_module():
    content = b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.dumps\x93."
    with pytest.raises(DataError, match=r"numpy\.ndarray\.dumps"):
        safe_pickle.loads(content, "batch")


@pytest.mark.parametrize("dtype", [object, "f8", "V4"])
def test_arrays_of_other_types_are_refused(dtype):
    content = pickle.dumps(np.zeros(3, dtype), protocol=2)
    with pytest.raises(DataError, match="an array of type"):
        safe_pickle.loads(content, "batch")


def test_bytes_in_a_strange_codec_are_refused():
    content = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R."
    with pytest.raises(DataError, match="codec"):
        safe_pickle.loads(content, "batch")


@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_written_by_python_3_are_read(protocol):
    x = np.arange(12, dtype=np.uint8).reshape(3, 4)
    got = safe_pickle.loads(pickle.dumps({"data": x, "labels": [1, 2]}, protocol=protocol), "batch")
    key = b"data" if b"data" in got else "data"
    np.testing.assert_array_equal(got[key], x)


def test_reading_leaves_numpys_own_types_alone():
    x = np.arange(3, dtype=np.uint8)
    safe_pickle.loads(pickle.dumps(x, protocol=2), "batch")
    assert np.dtype("u1") == np.uint8
    assert np.dtype("u1").itemsize == 1


def test_a_pickle_cannot_claim_memory_through_its_memo():
    content = b"\x80\x02]r\xff\xff\xff\x7f."  # an empty list, remembered under index 2**31 - 1
    with pytest.raises(DataError, match="memo index 2147483647"):
        safe_pickle.loads(content, "batch")


def test_a_cut_pickle_is_a_data_error():
    content = pickle.dumps([np.arange(100, dtype=np.uint8)], protocol=2)
    for cut in range(0, len(content), 7):
        with pytest.raises(DataError, match="not a readable pickle"):
            safe_pickle.loads(content[:cut], "batch")


def test_flipped_bytes_never_escape_as_another_error():
    content = pickle.dumps({b"data": np.arange(40, dtype=np.uint8), b"labels": [1, 2]}, protocol=2)
    refused = 0
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 0x5A
        try:
            safe_pickle.loads(bytes(damaged), "batch")
        except DataError:
            refused += 1
    assert refused > len(content) // 3  # the rest is pixels, which the checksum of the data set guards


def _array_pickle(flags: int) -> bytes:
    """A pickle of an array whose type of bytes claims ``flags`` of its own, 1 being "holds objects"."""
    dtype = (
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK"
        + bytes([flags])
        + b"tb"
    )
    blank = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    return b"\x80\x02" + blank + b"(K\x01(K\x10t" + dtype + b"\x89U\x10" + b"A" * 16 + b"tb."


def test_a_type_of_numbers_cannot_claim_to_hold_objects():
    """numpy takes such a claim from a pickle as it is, and then follows the bytes as addresses."""
    got = safe_pickle.loads(_array_pickle(flags=1), "batch")
    assert not got.dtype.hasobject
    np.testing.assert_array_equal(got, np.full(16, ord("A"), np.uint8))


@pytest.mark.parametrize("name", ["_codecs\nencode", "numpy\nndarray", "numpy\ndtype"])
def test_a_pickle_cannot_change_the_reader(name):
    change = b"\x80\x02c" + name.encode() + b"\nN}X\x0c\0\0\0__defaults__(X\x05\0\0\0rot13ts\x86b."
    with pytest.raises(DataError, match="not a readable pickle"):
        safe_pickle.loads(change, "batch")
    assert safe_pickle._ADMITTED["_codecs", "encode"]("a") == b"a"


def test_numpy_itself_is_not_within_reach():
    content = b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R."  # numpy.ndarray((2**31 - 1,))
    with pytest.raises(DataError, match="not callable"):
        safe_pickle.loads(content, "batch")


def test_tuples_of_tuples_do_not_take_for_ever():
    """Each holds the one before it twice, so that the hash of the last takes 2**40 steps."""
    doubled = b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(40))
    with pytest.raises(DataError, match="more tuples"):
        safe_pickle.loads(b"\x80\x02})" + doubled + b"K\x01s.", "batch")


def test_an_array_must_fill_its_shape():
    whole = _array_pickle(flags=0)
    for count in (b"\x0f", b"\x11"):
        with pytest.raises(DataError, match="in 16 bytes"):
            safe_pickle.loads(whole.replace(b"(K\x10t", b"(K" + count + b"t"), "batch")
