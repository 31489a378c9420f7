"""Parameters without a gradient on some ranks or on all, where DDP waits for one."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.kind import Cards, Kind, in_order, listed
from pytest_modelhealth.ranks.evidence.wrappers import Leaf, Wrapped, reducer_count
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks

Name = tuple[str, str]
"""A parameter: its layer and its own name."""


class _Usage(Kind):
    """The parameters that DDP waits for in vain.

    With ``find_unused_parameters`` or a static graph it does not wait.
    """

    def __init__(self, company: Company, wrapped: Wrapped, request: Request) -> None:
        super().__init__(company, wrapped, request)
        self._waited_for: list[Leaf] = []
        self._frozen: list[Name] = []
        self._together: list[set[Name]] = []
        """What each DDP waits for, once it has got one gradient."""
        self._names = [(leaf.layer, leaf.name) for leaf in wrapped.parameters]
        for ddp in wrapped.ddps:
            if ddp.find_unused_parameters or ddp.static_graph:
                continue
            kept = wrapped.keepers(ddp)
            leaves = [leaf for leaf in wrapped.parameters if id(leaf.tensor) in kept]
            self._waited_for += [leaf for leaf in leaves if leaf.tensor.requires_grad]
            trainable = sum(leaf.tensor.requires_grad for leaf in leaves)
            self._together.append({(leaf.layer, leaf.name) for leaf in leaves})
            if trainable < reducer_count(ddp):
                buckets = ddp.reducer._get_zeros_like_grad_buckets()
                known = {id(p) for bucket in buckets for p in bucket.parameters()}
                self._frozen += [
                    (leaf.layer, leaf.name)
                    for leaf in leaves
                    if id(leaf.tensor) in known and not leaf.tensor.requires_grad
                ]

        self._due = {(leaf.layer, leaf.name) for leaf in self._waited_for} | set(self._frozen)

    def card(self, own: Observation) -> tuple[Name, ...]:
        """Return the parameters without a gradient: none, as a rule."""
        if not own.backward:
            return ()
        return (*(name for leaf in self._waited_for if (name := _unused(leaf, own))), *self._frozen)


class Unused(_Usage):
    """Parameters that no rank uses: the next step of DDP raises, if it gets other gradients."""

    name = "unused_parameters"

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield what no rank uses, as one."""
        unused = set.intersection(*(set(card) for card in cards.values()))
        for waited_for in self._together:
            if waited_for & self._due <= unused:
                unused -= waited_for  # as of a teacher: a DDP without any gradient waits for none
        if not unused:
            return
        layers = in_order((layer for layer, _ in unused), joint)
        first = next(one for one in self._names if one in unused and one[0] == layers[0])
        count = len(unused)
        verb = "get" if count > 1 else "gets"
        among = named_ranks(self.company.ranks)
        yield Disagreement(
            self.name,
            first[0],
            "parameter_gradients",
            first[1],
            self.company.ranks,
            (),
            f"{listed('.'.join(first), count)} {verb} no gradient on {among}, and DDP waits for "
            "one: its next forward raises",
            float(count),
            layers,
        )


class Path(_Usage):
    """Parameters that some ranks use and others do not: these never finish the reduction."""

    name = "same_path"

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield what some ranks use, as one."""
        lacking: dict[Name, list[int]] = {}
        for rank, card in cards.items():
            for name in card:
                lacking.setdefault(name, []).append(rank)
        differing = {name: ranks for name, ranks in lacking.items() if len(ranks) < len(cards)}
        if not differing:
            return
        layers = in_order((layer for layer, _ in differing), joint)
        layer = layers[0]
        without = next(ranks for (name, _), ranks in differing.items() if name == layer)
        having = [rank for rank in self.company.ranks if rank not in without]
        odd = sorted({rank for ranks in differing.values() for rank in ranks})
        others = tuple(rank for rank in self.company.ranks if rank not in odd)
        more = f"; {len(layers) - 1:,} more layers differ, too" if len(layers) > 2 else ""
        more = "; one more layer differs, too" if len(layers) == 2 else more
        yield Disagreement(
            self.name,
            layer,
            "parameter_gradients",
            "",
            tuple(odd),
            others,
            f"its parameters get a gradient on {named_ranks(having)}, and none on "
            f"{named_ranks(without)}, where DDP waits for one{more}",
            float(len(layers)),
            layers,
        )


def _unused(leaf: Leaf, own: Observation) -> Name | None:
    record = own.layers.get(leaf.layer)
    if record is None or "parameter_gradients" not in record.watched:
        return None
    is_used = leaf.name in record.parameter_gradients or leaf.name in record.tied
    return None if is_used else (leaf.layer, leaf.name)
