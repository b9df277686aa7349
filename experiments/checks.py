"""What can be found wrong with a run before its images are read or a worker starts."""

from __future__ import annotations

import tempfile

from experiments.config import RunFile
from fedsir.clients.machine import machine_limits, visible_gpus
from fedsir.config.training import ExecutionConfig, ModelConfig
from fedsir.errors import BadInput


def check_work_dir(config: RunFile) -> None:
    """Raise BadInput where checkpoints could not be written."""
    folder = config.checkpoint_file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"work_dir = {config.work_dir}: checkpoints cannot be written to {folder} ({error.strerror or error}).\n"
            "Set work_dir to a folder of yours, for example --set work_dir=fedsir-runs."
        ) from error


def device_of(execution: ExecutionConfig) -> str:
    """The device that `auto`, `cuda` or `cpu` comes to on this machine."""
    return "cuda" if execution.device != "cpu" and visible_gpus() > 0 else "cpu"


def check_execution(execution: ExecutionConfig, clients: int) -> None:
    """Raise BadInput where this machine cannot hold the workers; clusters are asked when they are joined."""
    if execution.ray_address is not None:
        return
    gpus = visible_gpus()
    if execution.device == "cuda" and gpus == 0:
        raise BadInput(
            "execution.device is cuda, but torch sees no GPU on this machine.\n"
            "Set execution.device to auto or cpu, join a cluster with execution.ray_address, or see `fedsir doctor`."
        )
    if execution.actors == "in-process":
        for name in ("gpus_per_client", "memory_cap"):
            value = execution.model_dump()[name]
            if value is not None:
                raise BadInput(
                    f"execution.{name} is {value}, but with execution.actors in-process "
                    f"there are no actors to share GPUs.\nLeave {name} out, or set execution.actors to auto."
                )
        return
    from fedsir.clients.sizing import Node, pool_size

    here = Node("", "this machine", float(machine_limits().usable_cpus), float(gpus))
    pool_size(execution, clients, [here])


def check_model(model: ModelConfig, image_size: int) -> None:
    """Raise BadInput where the first weights cannot be had, or the images are too small for the network."""
    from fedsir.models.network import initial_network

    check_image_size(model, image_size)
    # The number of classes is not known before the images are; it concerns the head alone, which is drawn.
    initial_network(model, 2, seed=0)


def check_image_size(model: ModelConfig, image_size: int) -> None:
    """Raise BadInput where the images are too small for the network."""
    from fedsir.models.network import MIN_IMAGE_SIZE

    if model.backbone != "tiny" and image_size < MIN_IMAGE_SIZE:
        raise BadInput(
            f"data.image_size is {image_size}; the backbone {model.backbone} needs {MIN_IMAGE_SIZE} or more.\n"
            "Set it to 128, as in the paper, or 64 for speed."
        )
