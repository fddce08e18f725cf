"""Settings of a target in several processes, its ranks."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from specd.setting_types import Address, OptionalAddress


class RankSettings(BaseModel):
    """A process's part in a target with several ranks: it is rank 0, or a follower of rank 0."""

    ranks: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that hold the model together, each a part: this one, which is rank 0, and followers.",
    )
    ranks_listen: Address = Field("127.0.0.1:50054", description="Address for followers: HOST:PORT or unix:PATH.")
    follow: OptionalAddress = Field(
        "",
        description="Address of rank 0, its --ranks-listen: hold a part of its model. 'none': this worker is rank 0.",
    )
    rank: int = Field(0, ge=0, le=63, description="For a follower: its number among the ranks, from 1; 0 is any.")
    ranks_backend: Literal["ring", "jaccl", "nccl"] = Field(
        "ring", description="What connects the ranks: TCP, RDMA over Thunderbolt, or NVIDIA's library."
    )
    rank_host: str = Field(
        "", description="Host of this machine for collectives of the ranks; by default that of its connection."
    )
    rank_deadline_seconds: float = Field(
        5.0,
        ge=0.5,  # two beats of the ranks
        description="Least time that a step of several ranks may take, and a rank may be silent, before all ranks end, "
        "for their supervisors to restart them. A step may also take ten times its usual time.",
    )

    @model_validator(mode="after")
    def _check_follower(self) -> Self:
        if self.follow and self.ranks > 1:
            raise ValueError(f"ranks is {self.ranks} and follow is {self.follow}: only rank 0 has a number of ranks")
        adapters: str = getattr(self, "adapters", "")
        if self.takes_part and adapters:
            raise ValueError("adapters are set for a model in several ranks, which has none: leave out one of the two")
        return self

    @property
    def takes_part(self) -> bool:
        """Whether this process has a part of a model, and not all of it."""
        return self.ranks > 1 or bool(self.follow)
