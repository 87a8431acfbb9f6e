"""Python runs this when it starts with this folder and the repository on PYTHONPATH."""

from __future__ import annotations

from tests.torchvision_on_cpu import let_torchvision_in

let_torchvision_in()
