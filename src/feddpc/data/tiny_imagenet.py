"""Tiny ImageNet in its official layout; its test labels are unpublished, so the validation images are the test set."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from feddpc.data.dataset import Dataset
from feddpc.data.images import stack
from feddpc.data.specs import Spec
from feddpc.data.tree import Tree, open_tree
from feddpc.errors import DataError


def fits(names: list[str]) -> bool:
    """Whether these file names are Tiny ImageNet's layout."""
    return any(name == "wnids.txt" or name.endswith("/wnids.txt") for name in names)


def decode(spec: Spec, path: Path, show: bool | None = None) -> Dataset:
    """Read the official folder or zip; a class's index is its place among the sorted WordNet ids."""
    tree = open_tree(path)
    names = tree.names()
    if not fits(names):
        raise DataError(f"{path} is not Tiny ImageNet: it has no wnids.txt; give tiny-imagenet-200.zip or its folder")
    root = min((name for name in names if name.endswith("wnids.txt")), key=len).removesuffix("wnids.txt")
    classes = sorted(set(_text(tree, names, f"{root}wnids.txt").split()))
    train = [n for n in names if n.startswith(f"{root}train/") and n.endswith(".JPEG")]
    train_ids = [name.removeprefix(f"{root}train/").split("/")[0] for name in train]
    _check_classes(path, classes, set(train_ids), spec.classes)
    validation = _annotations(tree, names, root, set(classes))
    index = {wnid: i for i, wnid in enumerate(classes)}
    return Dataset.from_arrays(
        stack(tree, train, mode="RGB", text="reading training images", show=show),
        np.asarray([index[wnid] for wnid in train_ids]),
        stack(tree, list(validation), mode="RGB", text="reading validation images", show=show),
        np.asarray([index[wnid] for wnid in validation.values()]),
        name=spec.name,
        classes=spec.classes,
        class_names=tuple(classes),
    )


def _check_classes(path: Path, listed: list[str], in_train: set[str], expected: int) -> None:
    if len(listed) != expected:
        raise DataError(f"{path}: wnids.txt lists {len(listed)} classes, but Tiny ImageNet has {expected}")
    missing, extra = sorted(set(listed) - in_train), sorted(in_train - set(listed))
    if missing or extra:
        told = [
            f"{len(ids)} {what} ({', '.join(ids[:5])}{', ...' if len(ids) > 5 else ''})"
            for ids, what in ((missing, "missing"), (extra, "too many"))
            if ids
        ]
        raise DataError(f"{path}: the classes under train/ differ from wnids.txt: {'; '.join(told)}")


def _annotations(tree: Tree, names: list[str], root: str, classes: set[str]) -> dict[str, str]:
    """Return the class of every validation image by the image's name, checked to be complete both ways."""
    labels: dict[str, str] = {}
    for number, line in enumerate(_text(tree, names, f"{root}val/val_annotations.txt").splitlines(), 1):
        file, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in classes:
            raise DataError(
                f"{tree.path}: line {number} of val_annotations.txt names the class {wnid!r}, not in wnids.txt"
            )
        labels[f"{root}val/images/{file}"] = wnid
    present = {n for n in names if n.startswith(f"{root}val/images/") and n.endswith(".JPEG")}
    if present != labels.keys():
        odd = min(present ^ labels.keys())
        why = "has no line in val_annotations.txt" if odd in present else "is annotated but absent"
        raise DataError(f"{tree.path}: validation image {odd} {why}: the copy is incomplete; get it again")
    if not labels:
        raise DataError(f"{tree.path}: there are no validation images under {root}val/images")
    return labels


def _text(tree: Tree, names: list[str], name: str) -> str:
    if name not in names:
        raise DataError(f"{tree.path} lacks {name}: the copy is incomplete; get it again")
    ((_, content),) = tree.read([name])
    return content.decode("utf-8", errors="replace")
