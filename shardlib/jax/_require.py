"""JAX is an optional package: the errors where it is missing or too old."""

from __future__ import annotations

from importlib import metadata

from shardlib.errors import ShardlibError

__all__ = ["OLDEST", "require_jax"]

OLDEST = (0, 7)


def require_jax() -> None:
    """Raise unless a JAX that is new enough can be imported.

    Raises:
        ShardlibError: it is missing, or too old.
    """
    try:
        version = metadata.version("jax")
    except metadata.PackageNotFoundError:
        raise ShardlibError(
            "shardlib.jax needs JAX, which is not installed. Run `pip install shardlib[jax]`, or follow "
            "https://docs.jax.dev/en/latest/installation.html for an accelerator."
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ShardlibError(
            f"shardlib.jax needs JAX {oldest} or newer; {version} is installed. Run `pip install --upgrade "
            f'"jax>={oldest}"`.'
        )
