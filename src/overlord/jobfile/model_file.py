"""Reading of a Hugging Face ``config.json`` as a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from overlord.errors import JobError
from overlord.job.model import Model
from overlord.job.model_config import model_of


def read_model(config: Any, changes: Mapping[str, Any]) -> Model:
    """Return the model of a configuration: a dict, or the path of a file or of its folder."""
    if isinstance(config, Mapping):
        return model_of(config, changes)
    if not isinstance(config, (str, os.PathLike)):
        problem = f"expected a config.json or a dict of its keys, got {type(config).__name__}"
        raise JobError([problem], "model config")
    path = os.fspath(config)
    path = os.path.join(path, "config.json") if os.path.isdir(path) else path
    where = f"model config {path}"
    try:
        with open(path, encoding="utf-8") as file:
            plain = json.load(file)
    except OSError as fault:
        problem = f"could not be read: {fault.strerror or fault}; give the path of a config.json"
        raise JobError([problem], where) from fault
    except ValueError as fault:
        raise JobError([f"expected JSON, got an error: {fault}"], where) from fault
    if not isinstance(plain, dict):
        raise JobError([f"expected a JSON object, got {plain!r:.60}"], where)
    return model_of(plain, changes, where)
