"""Has a model that is spread over ranks run a step of which the other ranks learn nothing more."""

from __future__ import annotations

import threading
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
    """What this rank has of a model.

    Args:
        state: what the model holds while it is inspected.
        shards: its parameters, where `fully_shard` cut them.
        on_ranks: whether there are other ranks.
        notes: what a reader should know.
    """

    state: State
    shards: Shards | None = None
    on_ranks: bool = False
    notes: tuple[str, ...] = ()

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
        InspectionError: its engine does not allow that, or another thread is at it.
    """
    state = state or State(model)
    wrappers = _wrappers(state.modules)
    if not wrappers:
        yield Company(state, on_ranks=wrappers is not None)
        return
    wing("capture.parallel.wrappers:refuse_unknown_ways")(wrappers)
    with _alone(state) as is_first, ExitStack() as stack:
        yield _entered(model, state, wrappers, stack) if is_first else Company(state, on_ranks=True)


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
    if (wrappers := _wrappers(State(model).modules)) is not None:
        wing("capture.parallel.wrappers:refuse_repetition")(wrappers, reduces=reduces)


def _wrappers(modules: Iterable[nn.Module]) -> Wrappers | None:
    """Return what spreads these modules over ranks; ``None`` where there are no ranks."""
    if not has_process_group():
        return None
    wrappers: Wrappers = wing("capture.parallel.wrappers:find_wrappers")(modules)
    return wrappers


def _entered(model: nn.Module, state: State, wrappers: Wrappers, stack: ExitStack) -> Company:
    shards: Shards | None = None
    notes: tuple[str, ...] = ()
    if wrappers.sharded:
        shards = made = wing("capture.parallel.engines:Shards")(wrappers.sharded)
        if made.waits:
            notes = (_REDUCED,)
        stack.enter_context(made.apart())
        state = State(model)
    if wrappers.replicated:
        stack.callback(state.restore)
        wing("capture.parallel.engines:stay_local")(wrappers.replicated)
        state.exchange(wing("capture.parallel.engines:doubles")(wrappers.replicated))
        state = State(model)
    return Company(state, shards, on_ranks=True, notes=notes)


_REDUCED = (
    "gradients were reduced over the ranks, although set_requires_gradient_sync(False) is on: FSDP "
    "has no others for the parameters it shards"
)
_lock = threading.Lock()
_inside: dict[int, int] = {}  # the thread that inspects a module


@contextmanager
def _alone(state: State) -> Iterator[bool]:
    """Yield whether this is the first of nested inspections.

    Raises:
        InspectionError: another thread inspects a module of it.
    """
    own = dict.fromkeys(map(id, state.modules), threading.get_ident())
    with _lock:
        threads = {_inside[one] for one in own if one in _inside}
        if threads - set(own.values()):
            raise InspectionError(
                f"cannot inspect {type(state.modules[0]).__name__}: it is being inspected already, "
                "in another thread; one inspection of a model at a time"
            )
        if not threads:
            _inside.update(own)
    try:
        yield not threads
    finally:
        for one in () if threads else own:
            _inside.pop(one, None)
