"""The models of the paper's Table 1, and the assumption sets of the predicted step time."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.mesh import ClientPlaceTree
from overlord.planning import cost
from overlord.planning.cost import LengthCost, Transformer

ENCODERS = {"ViT-1B": cost.vit_1b, "ViT-2B": cost.vit_2b}
BACKBONES = {"Llama-12B": cost.llama_12b, "Mixtral": cost.mixtral_8x7b, "tMoE": cost.tmoe_25b}
MEASURED_KAPPA = (
    2.2  # one H200, Llama-12B layers: attention equals the rest at 25k tokens, by FLOPs at 55k
)
CARD_FLOPS = (
    119.5e12 * 0.4
    # an L20 in bf16, as in the paper, at 40 % of its peak: a scale for tokens/s that no ratio
    # depends
    # on
)
SYNCS = ("microbatch", "iteration", "1F1B")
# Who encodes the images that no plan moves: the rank's cards in turn before every microbatch, or
# once a step; every card all of them;
# the cards of the first stage in turn.
ENCODERS_UNPLANNED = ("own group", "own group once", "replicated", "stage 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An encoder and a backbone; attention counts ``kappa`` times its FLOPs."""

    encoder: str
    backbone: str
    kappa: float = 1.0

    @property
    def vit(self) -> LengthCost:
        return _weighed(ENCODERS[self.encoder], self.kappa)

    @property
    def llm(self) -> LengthCost:
        return _weighed(BACKBONES[self.backbone], self.kappa)

    def __str__(self) -> str:
        return f"{self.encoder} + {self.backbone}"


def pairs(kappa: float = 1.0) -> list[Pair]:
    return [Pair(encoder=e, backbone=b, kappa=kappa) for e in ENCODERS for b in BACKBONES]


def _weighed(model: Transformer, kappa: float) -> LengthCost:
    return LengthCost(linear=model.per_token, square=kappa * model.per_pair, column=model.column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One assumption set; each data-parallel rank is ``tp * pp`` GPUs."""

    # when ranks wait for each other: after every microbatch, once a step, or by a 1F1B pipeline and
    # once a step
    sync: str
    ranks: int = 64
    per_rank: int = 72  # samples; 0: as many as fill ``filled`` packed microbatches on every rank
    filled: int = 0
    tp: int = 1
    pp: int = 1
    encoder: str = "own group"  # of those that do not plan it
    one_source: bool = False  # every rank reads one source at a time
    merge: int = 1  # patches of an image token

    @property
    def place(self) -> ClientPlaceTree:
        return ClientPlaceTree(pp=self.pp, dp=self.ranks, tp=self.tp)

    @property
    def cards(self) -> int:
        return self.ranks * self.tp * self.pp

    def __str__(self) -> str:
        amount = f"n={self.per_rank}" if self.per_rank else f"{self.filled} full microbatches"
        words = [f"D={self.ranks}", amount, f"TP={self.tp} PP={self.pp}", f"encoder {self.encoder}"]
        words += ["one source a rank"] * self.one_source + [f"{self.merge} patches a token"] * (
            self.merge > 1
        )
        return ", ".join(words)


MAIN = (
    Setup(sync="microbatch"),
    Setup(sync="iteration"),
    Setup(sync="1F1B", tp=4, pp=4, encoder="own group once"),
)
SWEEP = (
    Setup(sync="microbatch", per_rank=0, filled=8),
    Setup(sync="iteration", per_rank=0, filled=8),
    Setup(sync="1F1B", per_rank=0, filled=16, tp=4, pp=4, encoder="own group once"),
    *MAIN,
    Setup(sync="iteration", per_rank=16),
    Setup(sync="microbatch", per_rank=16),
    Setup(sync="microbatch", per_rank=16, ranks=256),
    Setup(sync="microbatch", per_rank=8, ranks=256),
    Setup(sync="microbatch", per_rank=16, tp=4, encoder="replicated"),
    Setup(sync="microbatch", per_rank=16, merge=4),
    Setup(sync="microbatch", per_rank=16, one_source=True),
    Setup(sync="1F1B", tp=4, pp=4),
    Setup(sync="1F1B", tp=4, pp=4, encoder="stage 0"),
    Setup(sync="1F1B", tp=4, pp=4, encoder="replicated"),
)
