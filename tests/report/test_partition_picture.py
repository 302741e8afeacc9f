"""The picture of a partition can be drawn at every size, without touching matplotlib's global state."""

import sys

import numpy as np
import pytest
from PIL import Image

from feddpc.errors import BadInputError
from feddpc.report.partition_picture import draw


@pytest.mark.parametrize("shape", [(1, 1), (10, 10), (100, 200), (2500, 10)])
def test_picture_is_a_png_with_something_on_it(tmp_path, shape):
    counts = np.random.default_rng(0).integers(0, 50, shape)
    draw(counts, tmp_path / "p.png", class_names=[f"class {r}" for r in range(shape[1])], title="a title")
    with Image.open(tmp_path / "p.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 400
        assert np.asarray(image).std() > 5
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_clients_without_samples_and_bad_tables(tmp_path):
    draw(np.zeros((3, 2), np.int64), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
    with pytest.raises(BadInputError, match="shape"):
        draw([1, 2], tmp_path / "p.png")
    with pytest.raises(BadInputError, match="1 names for 2 classes"):
        draw([[1, 2]], tmp_path / "p.png", class_names=["a"])
