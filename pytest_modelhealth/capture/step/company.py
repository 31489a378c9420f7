"""Has a model that is spread over ranks run a step of which the other ranks learn nothing more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, distributed, nn

from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from pytest_modelhealth.capture.parallel.engines import Shards
    from pytest_modelhealth.capture.parallel.wrappers import Wrappers


@dataclass(frozen=True)
class Company:
    """What this rank has of a model."""

    state: State  # what the model holds while it is inspected
    shards: Shards | None = None  # its parameters, where `fully_shard` cut them
    on_ranks: bool = False  # whether there are other ranks
    notes: tuple[str, ...] = ()  # what a reader should know

    def parameters_shown(self) -> AbstractContextManager[None]:
        """Have the modules hold the parameters that the user knows; nothing may run inside."""
        return nullcontext() if self.shards is None else self.shards.shown()

    def known(self, leaves: list[Tensor]) -> list[Tensor]:
        """Return the parameters that the user knows in place of those that a forward used."""
        return leaves if self.shards is None else [self.shards.shard_of(leaf) for leaf in leaves]


def has_process_group() -> bool:
    """Whether this process is a rank among others."""
    return distributed.is_available() and distributed.is_initialized()


def may_have_company(model: object, ranks: bool | None) -> bool:
    """Whether other ranks may inspect a model with this one; `ranks` as in `Inspector`.

    Raises:
        InspectionError: that needs a process group, and there is none.
    """
    if ranks is False:
        return False
    is_module = isinstance(model, nn.Module)
    if has_process_group():
        return is_module
    if ranks:
        raise InspectionError(
            "ranks=True inspects on all ranks of a process group, and there is none: call "
            "torch.distributed.init_process_group first, or leave ranks out"
        )
    modules = (model, *vars(model).get("_modules", {}).values()) if is_module else ()
    if any(issubclass(kind, nn.parallel.DistributedDataParallel) for kind in {*map(type, modules)}):
        raise InspectionError(
            "the model is wrapped by DistributedDataParallel, and its process group was "
            "destroyed: inspect it before destroy_process_group(), or inspect model.module"
        )
    return False


@contextmanager
def in_company(model: nn.Module, state: State | None = None) -> Iterator[Company]:
    """Let a step inside leave no trace on what spreads `model` over ranks.

    Args:
        model: the model.
        state: what it holds, where the caller has looked already.

    Raises:
        InspectionError: its engine does not allow that.
    """
    state = state or State(model)
    wrappers = _wrappers(state.modules)
    own = set(map(id, state.modules))
    if not wrappers or not _inside.isdisjoint(own):
        yield Company(state, on_ranks=wrappers is not None)
        return
    wing("capture.parallel.wrappers:refuse_unknown_ways")(wrappers)
    _inside.update(own)
    with ExitStack() as stack:
        stack.callback(_inside.difference_update, own)
        shards: Shards | None = None
        if wrappers.sharded:
            shards = wing("capture.parallel.engines:Shards")(wrappers.sharded)
            stack.enter_context(shards.apart())
            state = State(model)
        if wrappers.replicated:
            stack.callback(state.restore)
            wing("capture.parallel.engines:stay_local")(wrappers.replicated)
            state.exchange(wing("capture.parallel.engines:doubles")(wrappers.replicated))
            state = State(model)
        notes = (_REDUCED,) if shards is not None and shards.waits else ()
        yield Company(state, shards, on_ranks=True, notes=notes)


_REDUCED = (
    "gradients were reduced over the ranks, although set_requires_gradient_sync(False) is on: FSDP "
    "has no others for the parameters it shards"
)
_inside: set[int] = set()
"""Modules whose wrappers are at rest already: an engine may run inside of `Beside`. That a model is
inspected twice at once is refused by `Inspection`, whatever spreads it."""


def notes_on_ranks(model: nn.Module) -> tuple[str, ...]:
    """Return what a reader should know of numbers that this rank took alone, as they passed by."""
    wrappers = _wrappers(model.modules())
    if not wrappers:
        return ()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    parts = ", and of parameters and gradients of its shards" if wrappers.sharded else ""
    return (f"these are numbers of rank {rank} of {size} alone, of its own batches{parts}",)


def refuse_again_and_again(model: nn.Module, *, reduces: bool = False) -> None:
    """Do nothing if `model` can be run several times and be put back each time.

    Args:
        model: the model.
        reduces: whether gradients are averaged over ranks in these runs.

    Raises:
        InspectionError: what spreads it over ranks does not allow that.
    """
    modules = State(model).modules if has_process_group() else ()
    if (wrappers := _wrappers(modules)) is not None:
        wing("capture.parallel.wrappers:refuse_repetition")(wrappers, reduces=reduces)


def _wrappers(modules: Iterable[nn.Module]) -> Wrappers | None:
    """Return what spreads these modules over ranks; ``None`` where there are no ranks."""
    if not has_process_group():
        return None
    wrappers: Wrappers = wing("capture.parallel.wrappers:find_wrappers")(modules)
    return wrappers
