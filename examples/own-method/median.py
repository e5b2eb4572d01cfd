"""FedAvg whose server takes the median of each number instead of the mean: a few bad clients cannot move it far."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pf2lora.methods.homlora import HomLoRA


@dataclass(frozen=True)
class MedianLoRA(HomLoRA):
    """The clients' weights do not count: a median has one vote for each."""

    name: ClassVar[str] = "median"
    label: ClassVar[str] = "Median"
    summary: ClassVar[str] = "HOMLoRA with the median of what clients send"
    not_private: ClassVar[str] = "its noise is made for a mean, and this server takes a median"

    def average(self, sent: Tensor, weights: Tensor) -> Tensor:
        ordered, K = sent.sort(dim=0).values, sent.shape[0]
        return (ordered[(K - 1) // 2] + ordered[K // 2]) / 2
