"""An inspection of a pipeline: the stages of all ranks, put together as one model.

Each stage is put together first, by the ranks that have it: replicas and shards, as any model. What
came of it then goes to all ranks once, so a rank gets what all layers say, and sends its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.parallel.wrappers import find_wrappers, refuse_unknown_ways
from pytest_modelhealth.capture.pipeline import PipelineEngine, stages_here
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.ranks import evidence
from pytest_modelhealth.ranks.asked import asked_of
from pytest_modelhealth.ranks.assembling import assembled
from pytest_modelhealth.ranks.averaging import Averager
from pytest_modelhealth.ranks.company import Company, digest
from pytest_modelhealth.ranks.evidence import Evidence
from pytest_modelhealth.ranks.meeting import first_difference
from pytest_modelhealth.ranks.patience import limited
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.ranks import Disagreement, Ranks, named_ranks
from pytest_modelhealth.report.stages import StageNames, joined_stages


def observed_in_stages(company: Company, request: Request) -> Observation:
    """Return what all ranks saw of one step of a schedule, of which each runs its stages.

    Args:
        company: the ranks of all stages.
        request: what is asked of this one.

    Raises:
        InspectionError: another rank failed, did not come, or inspects something else.
        Exception: whatever this rank's stage or loss raises, untouched.
    """
    schedule = request.model
    engine, stages = PipelineEngine(), stages_here(schedule)
    refuse_unknown_ways(find_wrappers(m for stage in stages for m in stage.submod.modules()))
    asked = _asked(request)
    company.meeting.agree("the run", digest(asked), asked)
    company.open()
    beside = company.among(_ranks_beside(company, stages))
    with company.telling("its run"), limited(company.meeting.seconds):
        noted = [_noted(beside, request, stage) for stage in stages]
        try:
            own = engine.run_stages(replace(request, averager=Averager(beside)))
        finally:
            for one in noted:
                one.close()
    company.meeting.agree("the reports are put together", "")
    with company.telling("putting the reports together"):
        mine = tuple(
            _put_together(beside, number, seen, one)
            for (number, seen), one in zip(own.items(), noted, strict=True)
        )
        numbers = tuple(own)
        found = company.distinct(mine, digest(repr(numbers)))
        whole = {one.number: one for _, each in found for one in each}
        return _joined(company, whole, type(schedule).__name__)


@dataclass(frozen=True)
class _Stage:
    """A stage, as all ranks that have it saw it.

    Args:
        number: its number.
        seen: what they saw.
        ranks: what they say of themselves.
    """

    number: int
    seen: Observation
    ranks: Ranks


def _asked(request: Request) -> str:
    schedule = request.model
    more: dict[str, Any] = {
        "schedule": type(schedule).__name__,
        "microbatches": schedule._n_microbatches,
        "stages": stages_here(schedule)[0].num_stages,
        "scale_grads": schedule.scale_grads,
    }
    if request.backward is not False:  # else the last stage alone has a use for it
        more["loss_fn"] = "None" if schedule._loss_fn is None else "given"
    return asked_of(request, **more)


def _ranks_beside(company: Company, stages: list[Any]) -> tuple[int, ...]:
    """Return the ranks that have the same stages as this one.

    Raises:
        InspectionError: their stages are not the same, on all ranks alike.
    """
    numbers = tuple(int(stage.stage_index) for stage in stages)
    said = "\n".join(evidence.described(stage.submod) for stage in stages)
    cards: list[tuple[tuple[int, ...], str]] = company.gather((numbers, digest(said)))
    groups: dict[tuple[int, ...], dict[int, str]] = {}
    for rank, (held, card) in zip(company.ranks, cards, strict=True):
        groups.setdefault(held, {})[rank] = card
    for held, having in groups.items():
        first, *others = having
        odd = [rank for rank in others if having[rank] != having[first]]
        if odd:
            texts = company.gather(said if company.rank in (first, odd[0]) else None)
            one, other = (texts[company.ranks.index(rank)] for rank in (odd[0], first))
            stage = " and ".join(map(str, held))
            raise InspectionError(
                f"{named_ranks(odd)} came to the run with something else than rank {first} as "
                f"stage {stage}{first_difference(one, other, first)}"
            )
    return tuple(groups[numbers])


def _noted(beside: Company, request: Request, stage: Any) -> Evidence:
    """Return what is noted before the run of a stage that several ranks have."""
    if beside.size == 1:
        return Evidence([])
    inputs = request.inputs if stage.is_first else ()
    return evidence.collected(
        beside, replace(request, model=stage.submod, inputs=inputs, target=None)
    )


def _put_together(beside: Company, number: int, own: Observation, noted: Evidence) -> _Stage:
    joint = assembled(beside, own, noted)
    found = evidence.disagreements(beside, noted, own, joint) if noted.kinds else ()
    assert joint.ranks is not None
    ranks = replace(joint.ranks, disagreements=found)
    layers = {name: _placed(record, beside.ranks) for name, record in joint.layers.items()}
    return _Stage(number, replace(joint, layers=layers, ranks=None), ranks)


def _placed(record: LayerRecord, ranks: tuple[int, ...]) -> LayerRecord:
    told = {role: replace(one, stage=ranks) for role, one in record.assembled.items()}
    return replace(record, assembled=told)


def _joined(company: Company, stages: Mapping[int, _Stage], model_type: str) -> Observation:
    order = [stages[number] for number in sorted(stages)]
    names = StageNames({stage.number: stage.seen.layers for stage in order})
    whole = joined_stages({stage.number: stage.seen for stage in order}, model_type)
    found: dict[tuple[str, ...], Disagreement] = {}
    for stage in order:
        for one in stage.ranks.disagreements:
            moved = _renamed(one, stage.number, names)
            found.setdefault((one.kind, moved.layer, one.role, one.tensor), moved)
    losses = order[-1].ranks.losses
    return replace(
        whole,
        ranks=Ranks(
            company.ranks, company.place.engine, company.groups, tuple(found.values()), losses
        ),
    )


def _renamed(one: Disagreement, stage: int, names: StageNames) -> Disagreement:
    return replace(
        one,
        layer=names.whole(stage, one.layer),
        layers=tuple(names.whole(stage, layer) for layer in one.layers),
    )
