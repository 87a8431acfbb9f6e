"""`PipelineStageManager`: this rank's place on the pipeline axis of a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib._mesh_shape import MeshShape

__all__ = ["PipelineStageManager"]


@dataclass(frozen=True)
class PipelineStageManager:
    """The stages of a pipeline as one rank sees them. `plugin.stage_manager` returns it.

    Attributes:
        mesh: the mesh.
        rank: the rank.
        num_model_chunks: how many stages of the model each rank has.
        use_zbv: whether a rank's second stage comes in the opposite order, so that the first rank has the last one.

    >>> manager = PipelineStageManager(MeshShape("pp=2,tp=2"), rank=3)
    >>> manager.stage, manager.num_stages, manager.is_last_stage(), manager.get_prev_rank()
    (1, 2, True, 1)
    """

    mesh: MeshShape
    rank: int
    num_model_chunks: int = 1
    use_zbv: bool = False

    @property
    def is_interleave(self) -> bool:
        """Whether a rank has several stages of the model."""
        return self.num_model_chunks > 1

    @property
    def num_stages(self) -> int:
        """The number of ranks along the pipeline axis."""
        return len(self._line)

    @property
    def stage(self) -> int:
        """This rank's index along the pipeline axis."""
        return self._line.index(self.rank)

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this rank has the first stage of the model: the first one on the axis."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Return whether this rank has the last stage of the model, and so its outputs.

        Args:
            ignore_chunk: whether it is the last rank on the axis instead, which differs with `pp_style="zbv"`.
        """
        return self.stage == (0 if self.use_zbv and not ignore_chunk else self.num_stages - 1)

    def get_rank(self) -> int:
        """Return this rank's number among all."""
        return self.rank

    def get_prev_rank(self) -> int:
        """Return the rank before this one on the axis; before the first comes the last."""
        return self._line[self.stage - 1]

    def get_next_rank(self) -> int:
        """Return the rank after this one on the axis; after the last comes the first."""
        return self._line[(self.stage + 1) % self.num_stages]

    @property
    def _line(self) -> list[int]:
        return next(line for line in self.mesh.groups(self.mesh.pipeline_axes) if self.rank in line)
