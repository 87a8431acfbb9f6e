"""The record of a model that runs in stages, and what `shard_model` installs for it.

The ranks of one stage have their own mesh, the whole mesh without the pipeline axis. On this mesh, the rest of the
model after the cut is sharded like any model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh_shape import MeshShape
from shardlib.engine.data.params import ParamState
from shardlib.engine.model.casting import Casting
from shardlib.engine.pipeline.messages import Channels, Timetable
from shardlib.engine.pipeline.route import Route
from shardlib.engine.pipeline.shared import Shared, shared_parameters
from shardlib.engine.pipeline.stages import Stages
from shardlib.engine.ranks.transport import has_tags
from shardlib.engine.undo import Undo

__all__ = ["Pipeline", "install_pipeline"]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The record of a model that runs in stages.

    Attributes:
        stages: its stages, and those of this rank.
        route: runs microbatches through this rank's stages.
        channels: the process groups to the ranks of other stages.
        shared: the parameters that several stages hold, in the order of all ranks; None for those of other ranks.
    """

    stages: Stages
    route: Route
    channels: Channels
    shared: Sequence[Shared | None]

    @cached_property
    def timetable(self) -> Callable[[Sequence[Hashable], bool], Timetable]:
        """A cached function that returns the messages for microbatches of these keys, with or without backward."""
        return lru_cache(maxsize=256)(
            lambda keys, train: Timetable(self.stages, [self.route.boundaries(key) for key in keys], train=train)
        )


def install_pipeline(
    model: nn.Module,
    stages: Stages,
    param_states: Mapping[str, ParamState],
    casting: Casting,
    region: DeviceMesh | None,
    undo: Undo,
) -> Pipeline:
    """Install the route of this rank's stages, once they are sharded. Creates groups: collective over all ranks.

    `region` is the mesh of the model axes, if all of this rank's model computes on DTensors.
    """
    group = stages.pipeline_group
    lines = [] if has_tags(group) else MeshShape.of(stages.mesh).groups((stages.axis,))
    channels = Channels.open(group, lines, stages.device)
    route = Route(model, stages, casting, region)
    route.install(model, undo)
    undo.callback(model.register_load_state_dict_pre_hook(stages.drop_foreign).remove)
    return Pipeline(stages, route, channels, shared_parameters(stages, param_states))
