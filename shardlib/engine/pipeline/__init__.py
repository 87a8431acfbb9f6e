"""Pipeline parallelism: stages of a model on the ranks of a mesh axis, and steps that run microbatches through them."""

from __future__ import annotations
