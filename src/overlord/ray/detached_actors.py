"""Detached actors of Ray: they keep running when the process that created them exits."""

from __future__ import annotations

from typing import Any

from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.ray.actors import reason_of
from overlord.ray.ray_import import exceptions, ray

NAMESPACE = "overlord-jobs"


def create_detached(factory: type, name: str) -> Any:
    """Return a new detached actor, of which up to four calls run concurrently.

    Raise ``JobError`` if a detached actor has this name.
    """
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": 4,
        "num_cpus": 0,
    }
    try:
        return ray.remote(factory).options(**options).remote(name)
    except exceptions.ActorAlreadyExistsError:
        raise JobError(
            [
                f"job {name!r}: expected a new name, got that of a job that another process "
                "has just submitted; use another name"
            ],
            "submit",
        ) from None


def detached_names() -> list[str]:
    """Return the names of all detached actors of Overlord in the cluster, sorted."""
    return sorted(
        found["name"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["namespace"] == NAMESPACE
    )


def find_detached(name: str) -> Any:
    """Return the detached actor of this name; None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def ask(actor: Any, method: str, *args: Any, timeout_s: float, what: str) -> Any:
    """Call a method through Ray and return its result; raise the exception of the method.

    An exception that is not of Overlord becomes an ``OverlordError``. Raise ``ActorLost`` if the
    actor is lost. ``what`` is the subject of the ``DataStall`` after ``timeout_s``.
    """
    try:
        return ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
    except exceptions.GetTimeoutError:
        raise DataStall(what, timeout_s) from None
    except exceptions.RayTaskError as fault:
        raise (
            fault.cause
            if isinstance(fault.cause, OverlordError)
            else OverlordError(f"{type(fault.cause).__name__}: {fault.cause}")
        ) from None
    except exceptions.RayError as fault:
        raise ActorLost(f"the actor {actor._actor_id.hex()}", reason_of(fault)) from None
