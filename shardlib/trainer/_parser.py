"""The command line that scripts have in common."""

from __future__ import annotations

import argparse

__all__ = ["get_default_parser"]


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser with the options that a script passes to `launch`. Your own option of the same name replaces one.

    >>> args = get_default_parser().parse_args(["--config", "config.py", "--from_torch"])
    >>> args.config, args.from_torch, args.rank
    ('config.py', True, None)
    """
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    parser.add_argument("--config", type=str, help="path of a .py or .toml file")
    parser.add_argument("--host", type=str, help="where rank 0 listens")
    parser.add_argument("--port", type=int, help="its port")
    parser.add_argument("--world_size", type=int, help="how many ranks there are")
    parser.add_argument("--rank", type=int, help="this rank's number")
    parser.add_argument("--local_rank", type=int, help="its number on this machine")
    parser.add_argument("--backend", type=str, help="of torch.distributed; by default the one that suits the device")
    parser.add_argument("--from_torch", action="store_true", help="take the numbers from torchrun")
    return parser
