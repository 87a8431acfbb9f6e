"""The versions of other libraries that their adapters were tested with."""

from __future__ import annotations

from shardlib.errors import warn

__all__ = ["warn_if_untested"]


def warn_if_untested(host: str, installed: str, tested: str) -> None:
    """Warn if a library's version is not one that begins with `tested`, such as "5.23". Adapters call it on import.

    >>> warn_if_untested("lightning", "2.6.6", "2.6")
    """
    if installed != tested and not installed.startswith(f"{tested}."):
        warn(f"shardlib.integrations.{host} was tested with {host} {tested}, and {installed} is installed.")
