"""Which modules of a LightningModule hold their weights in shards, and how they come to."""

import itertools
from collections import Counter
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lit_llm.huggingface import outermost_models

__all__ = ["broadcast_weights", "check_sharding", "is_sharded", "reshard", "shard_modules", "units_to_shard"]


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to anything in it."""
    return any(isinstance(submodule, FSDPModule) for submodule in module.modules())


def units_to_shard(module: nn.Module, pattern: str | None = None) -> list[nn.Module]:
    """The modules to shard, each before those it is part of: blocks, then the models around them, then the rest.

    Blocks are those that ``pattern`` matches, or what the Hugging Face model names as not to be split, or the members
    of module lists that hold several modules of one class.

    Args:
        module: a module with Hugging Face models somewhere inside.
        pattern: the end of the names of modules, ``*`` for anything between two dots: ``"layers.*"``.

    Raises:
        MisconfigurationException: if the pattern matches nothing or splits tied weights, or if there is a parameter
            that no module with a ``forward`` of its own holds.
    """
    models = outermost_models(module)
    blocks = _named_blocks(module, pattern) if pattern is not None else [b for m in models for b in _find_blocks(m)]
    units = list(dict.fromkeys([*reversed(blocks), *models]))
    return units + _remaining_units(module, set(units))


def _named_blocks(module: nn.Module, pattern: str) -> list[nn.Module]:
    parts = pattern.split(".")
    names = [name for name, _ in module.named_modules() if name]
    found = [
        name
        for name in names
        if len(name.split(".")) >= len(parts)
        and all(itertools.starmap(fnmatchcase, zip(name.split(".")[-len(parts) :], parts, strict=True)))
    ]
    if not found:
        raise MisconfigurationException(
            f"shard_modules={pattern!r} matches no module: it is compared with the end of names like "
            f"{', '.join(map(repr, names[:12]))}"
        )
    blocks = [module.get_submodule(name) for name in found]
    for name, block in zip(found, blocks, strict=True):
        if type(block).forward is nn.Module.forward:
            raise MisconfigurationException(
                f"shard_modules={pattern!r} matches {name!r}, a {type(block).__name__} that is never called: name its "
                f"members, {pattern + '.*'!r}"
            )
        if tied := _tied_outside(module, block):
            raise MisconfigurationException(
                f"shard_modules={pattern!r} matches {name!r}, whose weights are tied to {tied!r}: tied weights must "
                "be sharded together. Leave it out, the model around both takes them"
            )
    return blocks


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [submodule for submodule in model.modules() if type(submodule).__name__ in names]
    if not blocks:
        for container in model.modules():
            if isinstance(container, nn.ModuleList):
                counts = Counter(type(member) for member in container)
                blocks += [member for member in container if counts[type(member)] > 1]
    return [block for block in blocks if _has_parameters(block) and not _tied_outside(model, block)]


def _tied_outside(root: nn.Module, block: nn.Module) -> str | None:
    """The name of a parameter of ``block`` by which something outside it knows it too."""
    inside = set(block.modules())
    own = set(block.parameters())
    for prefix, submodule in root.named_modules():
        if submodule not in inside:
            for name, parameter in submodule.named_parameters(recurse=False):
                if parameter in own:
                    return f"{prefix}.{name}".lstrip(".")
    return None


def _remaining_units(module: nn.Module, taken: set[nn.Module]) -> list[nn.Module]:
    """What holds parameters outside ``taken``; modules around one of those cannot be taken whole."""
    if module in taken or not _has_parameters(module):
        return []
    own = [name for name, _ in module.named_parameters(recurse=False)]
    splits = type(module).forward is nn.Module.forward or any(submodule in taken for submodule in module.modules())
    if not splits and not isinstance(module, LightningModule):
        return [module]
    if own:
        raise MisconfigurationException(
            f"{type(module).__name__} holds the parameter {own[0]!r} itself: weights are gathered when the forward of "
            "the module that holds them is called. Put it into a module of its own (nn.Module), or apply fully_shard "
            "in configure_model"
        )
    return [unit for child in module.children() for unit in _remaining_units(child, taken)]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def broadcast_weights(module: nn.Module, device: torch.device) -> None:
    """Give every rank the weights and buffers of rank 0, one tensor at a time."""
    if dist.get_world_size() == 1:
        return
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.is_meta:
            on_device = tensor.detach().to(device).contiguous()
            dist.broadcast(on_device, 0)
            tensor.detach().copy_(on_device)


def shard_modules(units: list[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the weights of each over all ranks of ``mesh``; it then gathers them while its forward or backward runs."""
    for unit in units:
        fully_shard(unit, mesh=mesh)


def reshard(module: nn.Module) -> None:
    """Let go of what is gathered: an evaluation leaves it so, and an optimizer must not be given whole weights."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def check_sharding(module: nn.Module, world_size: int) -> None:
    """Refuse a parameter whose gradient would not be averaged over all ranks.

    Raises:
        MisconfigurationException: with its name and what to do.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() != world_size:
            raise MisconfigurationException(
                f"the parameter {name!r} is sharded over {parameter.device_mesh.size()} of {world_size} ranks, and its "
                "gradient would be averaged over them alone: call fully_shard(…, mesh=self.device_mesh) in "
                "configure_model, which covers both axes"
            )
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise MisconfigurationException(
                f"the parameter {name!r} is trained but not sharded, so nothing would average its gradient: apply "
                "fully_shard to all of the module in configure_model, or to nothing"
            )
