"""Overlord for torch trainers: ``import overlord.torch as ot``.

Names are imported at their first use, and torch with the first of them. Install it with ``pip
install 'overlord-data[torch]'``. The page 'With torch' of the documentation is a guide; 'What
frameworks read' lists the keys that each framework reads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overlord.checks import pip_install

_HOME = {
    "tensors": "overlord.torch.tensor_step",
    "TensorStep": "overlord.torch.tensor_step",
    "TensorMicrobatch": "overlord.torch.tensor_step",
    "DevicePrefetcher": "overlord.torch.device_prefetch",
    "Dataset": "overlord.torch.dataset",
    "Loader": "overlord.torch.loader",
    "StatefulLoader": "overlord.torch.loader",
    "LoaderState": "overlord.torch.checkpoint",
    "save_state": "overlord.torch.checkpoint",
    "load_state": "overlord.torch.checkpoint",
    "offload": "overlord.torch.activation_offload",
    "token_loss": "overlord.torch.loss",
    "microbatch_loss": "overlord.torch.step_share",
    "source_losses": "overlord.torch.loss",
    "token_losses": "overlord.torch.loss",
    "TokenMean": "overlord.torch.token_mean",
    "evaluate": "overlord.torch.token_mean",
    "document_sums": "overlord.torch.by_document",
    "join": "overlord.torch.rendezvous",
    "BroadcastClient": "overlord.torch.broadcast_client",
    "TempBalance": "overlord.torch.temp_balance",
    "spectra": "overlord.torch.weight_spectra",
    **dict.fromkeys(
        ("route", "place_rows", "Exchange", "tied", "share_rows"), "overlord.torch.image_routing"
    ),
}
_MODULES = {
    "adapters": "overlord.torch.adapters",
    "hdp": "overlord.torch.hdp",
    "recipes": "overlord.torch.recipes",
}

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module 'overlord.torch' has no attribute {name!r}")
    try:
        module = import_module(_MODULES.get(name) or _HOME[name])
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.partition(".")[0] == "torch":
            raise ImportError(
                f"overlord.torch.{name} needs torch: {pip_install('torch')}"
            ) from missing
        raise
    value: Any = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from overlord.torch import adapters as adapters
    from overlord.torch import hdp as hdp
    from overlord.torch import recipes as recipes
    from overlord.torch.activation_offload import offload as offload
    from overlord.torch.broadcast_client import BroadcastClient as BroadcastClient
    from overlord.torch.by_document import document_sums as document_sums
    from overlord.torch.checkpoint import LoaderState as LoaderState
    from overlord.torch.checkpoint import load_state as load_state
    from overlord.torch.checkpoint import save_state as save_state
    from overlord.torch.dataset import Dataset as Dataset
    from overlord.torch.device_prefetch import DevicePrefetcher as DevicePrefetcher
    from overlord.torch.image_routing import Exchange as Exchange
    from overlord.torch.image_routing import place_rows as place_rows
    from overlord.torch.image_routing import route as route
    from overlord.torch.image_routing import share_rows as share_rows
    from overlord.torch.image_routing import tied as tied
    from overlord.torch.loader import Loader as Loader
    from overlord.torch.loader import StatefulLoader as StatefulLoader
    from overlord.torch.loss import source_losses as source_losses
    from overlord.torch.loss import token_loss as token_loss
    from overlord.torch.loss import token_losses as token_losses
    from overlord.torch.rendezvous import join as join
    from overlord.torch.step_share import microbatch_loss as microbatch_loss
    from overlord.torch.temp_balance import TempBalance as TempBalance
    from overlord.torch.tensor_step import TensorMicrobatch as TensorMicrobatch
    from overlord.torch.tensor_step import TensorStep as TensorStep
    from overlord.torch.token_mean import TokenMean as TokenMean
    from overlord.torch.token_mean import evaluate as evaluate
    from overlord.torch.weight_spectra import spectra as spectra
