"""The network, the training budget and where it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsir.config.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section

Precision = Literal["32", "bf16-mixed"]
BackboneName = Literal["squeezenet1_1", "shufflenet_v2_x1_0", "regnet_y_400mf", "tiny"]


class ModelConfig(Section):
    """Backbone and the weights it starts from.

    `weights`: `imagenet` (torchvision), `random`, `phantom-pretext` (only `tiny`), or the path of a file.
    """

    backbone: BackboneName = "squeezenet1_1"
    weights: str = Field(default="imagenet", min_length=1)
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0


class OptimizerConfig(Section):
    """Adam with coupled L2 weight decay, fresh for every client and round."""

    lr: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 5e-4


class TrainingConfig(Section):
    """Budget of the main stage; equal for every method of a condition."""

    rounds: PositiveInt = 100
    local_epochs: PositiveInt = 1
    batch_size: PositiveInt = 128
    optimizer: OptimizerConfig = OptimizerConfig()
    participation: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] = Field(
        default=1.0, description="share of the clients that train in a round, drawn anew for each; at least one"
    )


class EvaluationConfig(Section):
    """How the global model is evaluated on the held-out images after every round."""

    # Each keeps a matrix of all pairs of classes; the ends of the interval are steady long before this.
    bootstrap_samples: PositiveInt = Field(default=1000, le=100_000)
    confidence: Fraction = 0.95


class ExecutionConfig(Section):
    """Where client work runs; none of it may change a result except `threads`, `device`, `precision`, `deterministic`
    and `compile`.

    `actors`: `per-client`, a number of Ray actors that share the clients, `auto` (one per CPU core, at most
    one per client; per client when clients get GPU fractions) or `in-process` (no Ray, for debugging).
    `gpus_per_client`: a fraction of a GPU or a whole number of them; `auto`: as many actors to a GPU as a measurement
    of network, batch and image size says will fit; left out, one actor per GPU unless more actors are asked for.
    `task_timeout_s`: seconds that an actor may work for one client before it counts as hung and another one does it
    again; the first work for a run may take `startup_timeout_s` more. Without actors (`in-process`) nothing ends a hung
    client.
    """

    actors: PositiveInt | Literal["auto", "per-client", "in-process"] = "auto"
    threads: PositiveInt = Field(default=1, description="CPU threads per client; part of what determines the bits")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_client: NonNegativeFloat | Literal["auto"] | None = Field(
        default=None, description="GPU fraction of each actor"
    )
    memory_cap: Annotated[float, Field(strict=True, gt=0, le=1)] | None = Field(
        default=None, description="share of its GPU's memory that an actor may allocate, beside the CUDA context"
    )
    precision: Precision = "32"
    deterministic: bool = Field(
        default=True, description="on GPUs, the same bits every time; false: TF32 and the fastest algorithms"
    )
    compile: bool = Field(default=False, description="torch.compile of the backbone; other bits, slower to start")
    ray_address: str | None = Field(default=None, description="join this Ray cluster instead of starting one")
    startup_timeout_s: PositiveFloat = 120.0
    task_timeout_s: PositiveFloat | None = Field(
        default=7200.0, description="longest work of an actor for one client, null for no limit"
    )
