"""The keys of the configuration, one field each, and the values that they may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from feddpc.config.domains import check_domains
from feddpc.config.metadata import Keyed, Options, about, key


@dataclass(frozen=True, kw_only=True, repr=False)
class Config(Keyed):
    """Everything that decides what a run computes. ``auto`` and empty values are filled in before it starts.

    >>> Config.read({"rounds": 5, "method": "fedavg", "lr": 0.1})
    Config(method='fedavg', rounds=5)
    >>> Config.read({"server_optimizer": {"name": "adam", "tau": 0.01}}).server_optimizer_options
    {'tau': 0.01}
    """

    method: str = key(
        "feddpc",
        "The method: a name (`feddpc methods` lists them) or FILE.py:CLASS.",
        "method",
        kind="method",
        per_run=True,
        after_setup=True,
    )
    data: str = key(
        "digits",
        "The data set: a name (`feddpc data list`), a path (.npz, folder, archive) or FILE.py:FUNCTION.",
        "data",
        kind="data",
        at_nodes=True,
    )
    model: str = key(
        "auto",
        "The network, or FILE.py:NAME for a module class or a function of your own.",
        "method",
        shown="auto, by the kind of data and the size of images",
        kind="model",
        choices=("lenet5", "resnet18", "cnn", "mcmahan-cnn", "mlp", "lstm", "transformer"),
    )
    task: str = key(
        "auto",
        "What is learned, or FILE.py:CLASS.",
        "data",
        shown="auto, by the targets of the data",
        kind="task",
        choices=("classification", "regression", "multilabel", "next-token"),
    )
    loss: str = key(
        "auto",
        "The loss of a sample or token, or FILE.py:FUNCTION of outputs and targets that returns one value for each.",
        "training",
        shown="auto, by the task",
        kind="loss",
        choices=("cross-entropy", "squared", "absolute", "huber", "logistic"),
    )
    metrics: str = key(
        "",
        "What is measured, separated by commas: accuracy, top-5, f1, mse, mae, r2, perplexity, auc, loss, or "
        "FILE.py:FUNCTION of all outputs and targets. The first one says what is best.",
        "training",
        shown="those of the task",
        kind="metric",
    )
    evaluate_every: int = key(
        1, "Evaluate the model after every so many rounds, and always after the last one.", "training"
    )
    evaluate_clients: bool = key(
        False,
        "Also evaluate the model on samples of each client that are held out of its training.",
        "training",
        simulator_only=True,
    )
    client_test: float = key(
        0.2, "Share of each client's samples that `evaluate_clients` holds out.", "data", at_nodes=True
    )
    finetune_steps: int = key(
        0,
        "With `evaluate_clients`, let each client also make so many local steps first: personalization.",
        "training",
        simulator_only=True,
    )
    clients: int = key(100, "Number of clients.", "federation")
    cohort: int = key(10, "Clients that are sampled per round.", "federation")
    partition: str = key(
        "auto",
        "How the training set is split among the clients; also FILE.py:FUNCTION.",
        "data",
        shown="auto: natural where the data say who holds what, dirichlet for classes, else iid",
        kind="partition",
        choices=("dirichlet", "dirichlet-equal", "shards", "quantity", "iid", "natural"),
        at_nodes=True,
    )
    alpha: float = key(
        0.2, "Parameter of the Dirichlet partitions; small values give uneven clients.", "data", at_nodes=True
    )
    participation: str = key(
        "uniform",
        "How the cohort of a round is sampled; poisson may sample no client, and is what privacy needs.",
        "federation",
        kind="sampler",
        choices=("uniform", "bernoulli", "poisson", "cyclic", "markov", "weighted"),
    )
    dropout: float = key(0.0, "Probability that a sampled client never answers.", "federation")
    weighting: Literal["uniform", "samples"] = key(
        "uniform",
        "Weights of the clients in the mean: equal, or proportional to their numbers of samples.",
        "training",
        after_setup=True,
    )
    rule: str = key(
        "mean",
        "A robust rule in place of the mean, with any method.",
        "robustness and privacy",
        kind="rule",
        choices=(*("mean", "median", "trimmed_mean", "krum", "multi_krum"), *("centered_clipping", "geometric_median")),
    )
    rounds: int = key(100, "Communication rounds.", "training", may_change=True, after_setup=True)
    lr: float = key(
        0.1,
        "Learning rate of the clients; `client_lr` in Python means the same.",
        "training",
        after_setup=True,
        tuned=True,
    )
    server_lr: float | None = key(
        None,
        "Learning rate of the server; equal rates are plain averaging.",
        "training",
        shown="that of the clients",
        after_setup=True,
        tuned=True,
    )
    lr_decay: float = key(1.0, "Factor per round on both learning rates.", "training", after_setup=True, tuned=True)
    lr_schedule: str = key(
        "constant",
        "Factor on both learning rates by round, in place of `lr_decay`; in Python also a function of the round.",
        "training",
        choices=("constant", "cosine", "step", "warmup"),
        after_setup=True,
        tuned=True,
    )
    client_optimizer: str = key(
        "sgd",
        "How clients make local steps: by torch's rules, from a state of zero in every round. Options of sgd are "
        "momentum, nesterov and weight_decay.",
        "training",
        choices=("sgd", "adam", "adamw"),
        after_setup=True,
        tuned=True,
    )
    clip_norm: float | None = key(
        None,
        "Shorten the direction of every local step to this length where it is longer.",
        "training",
        shown="no clipping",
        after_setup=True,
        tuned=True,
    )
    server_optimizer: str = key(
        "sgd",
        "How the server steps along the method's direction; sgd is the method's own step. With adam, yogi and adagrad "
        "`server_lr` is 0.01 unless set.",
        "training",
        choices=("sgd", "momentum", "adam", "yogi", "adagrad"),
        after_setup=True,
        tuned=True,
    )
    batch_size: int | None = key(
        None,
        "Samples per local step; the last, smaller batch is kept.",
        "training",
        shown="256, or half a client's samples where those are fewer",
        tuned=True,
    )
    epochs: int = key(1, "Local epochs per round.", "training", tuned=True)
    reserve: float | None = key(
        None,
        "Share of the training set, equal by class, that the server keeps and clients do not get.",
        "data",
        shown="what the method needs; the same for all methods of a comparison",
    )
    validation: float = key(
        0.0, "Share of every class of the training set that no client trains on, evaluated after every round.", "data"
    )
    seed: int = key(0, "Seed of partition, initial model, cohorts and batches.", "training", per_run=True)
    buffers: Literal["auto", "average", "local", "refuse"] = key(
        "auto",
        "What happens to statistics that a network measures in training, such as BatchNorm's: `average` takes their "
        "mean over the clients, `local` leaves them with each client, `refuse` refuses such networks.",
        "training",
        shown="auto: average, but local with FedBN",
        after_setup=True,
        simulator_only=True,
    )
    keep: Literal["last", "best"] = key(
        "last",
        "The model that a run returns and writes: that of its last round, or of the round with the best primary metric "
        "on validation data; without validation data on the test set, which is then no fair test of that model any "
        "more.",
        "training",
        after_setup=True,
    )
    scaling: Literal["auto", "half", "channel", "unit", "none"] = key(
        "auto",
        "How bytes become network inputs: to [-1, 1], by mean and deviation per channel, to [0, 1], or not at all.",
        "data",
        shown="auto: half for images of bytes, none for floats",
    )
    augment: bool = key(
        False, "Random crops (an eighth of the side, at least 2 pixels) and flips of training images.", "data"
    )
    transform: str = key(
        "",
        "FILE.py:FUNCTION that changes the inputs of every training batch, given uniform random numbers per sample.",
        "data",
        shown="none",
        kind="transform",
    )
    precision: Literal["float32", "float64", "tf32", "bf16"] = key(
        "float32",
        "Arithmetic. float32 is exact float32 also on a GPU; tf32 rounds products to 10 bits; bf16 runs the network in "
        "bfloat16 and keeps parameters, gradients and server in float32.",
        "training",
    )
    device: str = key(
        "auto",
        "The device: cpu, cuda, cuda:1.",
        "execution",
        shown="auto: a GPU if there is one",
        changes_numbers=False,
        at_nodes=True,
    )
    engine: str = key(
        "auto",
        "How clients are trained. auto is a fixed rule of device, model size, batch size and cohort.",
        "execution",
        kind="engine",
        choices=("auto", "loop", "threads", "stacked", "cuda", "distributed"),
        changes_numbers=False,
        after_setup=True,
        at_nodes=True,
    )
    inner_engine: str = key(
        "auto",
        "With the engine distributed, how each rank trains its clients.",
        "execution",
        choices=("auto", "loop", "threads", "stacked", "cuda"),
        changes_numbers=False,
        after_setup=True,
        simulator_only=True,
    )
    rank_timeout: float = key(
        1800.0,
        "With the engine distributed, seconds after which a rank that does not answer ends the run.",
        "execution",
        changes_numbers=False,
        may_change=True,
        after_setup=True,
        simulator_only=True,
    )
    compile: bool | Literal["auto"] = key(
        "auto",
        "Compile the steps of the engine cuda before round 1, which takes up to minutes; auto does not.",
        "execution",
        choices=("auto", "true", "false"),
        changes_numbers=False,
        after_setup=True,
        at_nodes=True,
    )
    data_memory: Literal["auto", "device", "host"] = key(
        "auto",
        "Where training samples lie: on the device, or in host memory (or mapped files), from where those of a cohort "
        "are copied to the device before its steps and those of the next one are read meanwhile.",
        "execution",
        shown="auto: host for mapped files, and where the samples would take more than half of a GPU's free memory",
        changes_numbers=False,
        may_change=True,
        simulator_only=True,
    )
    client_memory: Literal["auto", "device", "host", "disk"] = key(
        "auto",
        "Where per-client states are kept. auto takes the device if all of them fit into a quarter of its free memory, "
        "else the host's memory if they fit into half of that, else the disk.",
        "execution",
        changes_numbers=False,
        may_change=True,
        after_setup=True,
        at_nodes=True,
    )
    threads: int | Literal["auto"] | None = key(
        None,
        "CPU threads; auto takes one for small models, where a second gains nothing.",
        "execution",
        shown="auto on the command line, torch's own number in Python",
        changes_numbers=False,
        at_nodes=True,
    )
    hyper: Options = field(
        default_factory=dict,
        metadata=about(
            "Hyper-parameters of the method.", "method", options_of="method", per_run=True, after_setup=True
        ),
    )
    model_options: Options = field(
        default_factory=dict, metadata=about("Options of the network.", "method", options_of="model", at_nodes=True)
    )
    data_options: Options = field(
        default_factory=dict,
        metadata=about(
            "Options of a table or a function: target=price, client=user.", "data", options_of="data", at_nodes=True
        ),
    )
    partition_options: Options = field(
        default_factory=dict, metadata=about("Options of the partition.", "data", options_of="partition", at_nodes=True)
    )
    participation_options: Options = field(
        default_factory=dict, metadata=about("Options of the sampler.", "federation", options_of="participation")
    )
    lr_schedule_options: Options = field(
        default_factory=dict,
        metadata=about("Options of the schedule.", "training", options_of="lr_schedule", after_setup=True),
    )
    client_optimizer_options: Options = field(
        default_factory=dict,
        metadata=about(
            "Options of the clients' optimizer.", "training", options_of="client_optimizer", after_setup=True
        ),
    )
    server_optimizer_options: Options = field(
        default_factory=dict,
        metadata=about(
            "Options of the server's optimizer.", "training", options_of="server_optimizer", after_setup=True
        ),
    )
    privacy: Options = field(
        default_factory=dict,
        metadata=about(
            "Client-level differential privacy, for FedDPC and FedAvg: clip with epsilon or noise, and delta.",
            "robustness and privacy",
            options_of="privacy",
        ),
    )
    rule_options: Options = field(
        default_factory=dict, metadata=about("Options of the robust rule.", "robustness and privacy", options_of="rule")
    )
    screen: Options = field(
        default_factory=dict,
        metadata=about(
            "Reject updates longer than norm times the median norm of the last window (100) updates: norm=5.",
            "robustness and privacy",
            options_of="screen",
        ),
    )
    faults: Options = field(
        default_factory=dict,
        metadata=about(
            "Shares of clients that misbehave: sign_flip=0.2. Also nan, inf, huge, zero, scaled, noise, replayed, "
            "colluding, parallel, straggler.",
            "robustness and privacy",
            options_of="faults",
        ),
    )

    def __post_init__(self) -> None:
        check_domains(self)
