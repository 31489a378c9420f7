"""A ledger: the statistics that `reduce` gives, to the last bit, of tensors that may be gone."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_modelhealth.statistics import (
    Ledger,
    TensorStatistics,
    UnsupportedTensorError,
    native,
    reduce,
)
from tests.statistics import oracle
from tests.statistics.tensors import tensors

needs_library = pytest.mark.skipif(
    native.library() is None, reason="the kernel is not compiled: python hatch_build.py"
)


def noise(*shape: int) -> Tensor:
    """Return random values, a tenth of them zero."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.where(values.abs() > 0.12, 0.0)


@given(drawn=st.lists(tensors(), max_size=6))
def test_many_tensors_at_once_are_what_each_is_alone(drawn: list[Tensor]) -> None:
    """Every bit is that of `reduce`; what the kernel does not read is left out."""
    for entry, tensor in zip(Ledger().add_many(drawn), drawn, strict=True):
        if entry is not None:
            assert not entry.has_units
            assert oracle.bits(entry.statistics) == oracle.bits(reduce(tensor))
        else:
            is_read = native.is_plain(tensor) and native.Results().read(tensor, None) >= 0
            assert not is_read


@needs_library
def test_differences_are_those_of_torch_bit_for_bit() -> None:
    """They are read without being written; what does not lie alike, and halves, are left out."""
    spoilt = noise(40, 50)
    spoilt[1, 2], spoilt[3, 4] = torch.inf, torch.nan
    deep = noise(2, 3, 4, 5).to(memory_format=torch.channels_last)
    large = torch.tensor(3e38)
    pairs = [(one, one.flip(0)) for one in (noise(300, 400), noise(7).double(), spoilt)]
    pairs += [(deep, deep * 0.9), (large, -large), (spoilt, spoilt.clone())]
    unread = [
        (noise(4, 6).t(), noise(6, 4)),
        (noise(6, 4)[:, :2], noise(6, 4)[:, :2]),
        (noise(6), noise(6).double()),
        (noise(6), noise(7)[1:].reshape(2, 3)),
        (noise(6).half(), noise(6).half()),
        (noise(6).bfloat16(), noise(6).bfloat16()),
    ]
    entries = Ledger().add_many(*zip(*pairs, *unread, strict=True))
    for entry, (one, other) in zip(entries, pairs, strict=False):
        assert entry is not None
        assert oracle.bits(entry.statistics) == oracle.bits(reduce(one - other))
    assert entries.unread == list(range(len(pairs), len(pairs) + len(unread)))


@pytest.mark.parametrize("queue_all", [False, True])
def test_entries_of_what_was_converted_or_reshaped(queue_all: bool) -> None:
    """The dtype or the shape is another then; the values, and what is not finite, are the same."""
    values = noise(3, 4)
    values[1, 2] = torch.nan
    entry = Ledger(queue_all=queue_all).add(values, 1)
    renamed, flat = entry.of_dtype(torch.float16), entry.reshaped((12,))
    assert (entry.has_units, renamed.has_units, flat.has_units) == (True, True, False)
    assert (renamed.statistics.dtype, entry.statistics.dtype) == ("float16", "float32")
    assert (flat.statistics.shape, flat.statistics.units) == ((12,), None)
    assert flat.statistics.first_nonfinite == (None if queue_all else (6,))
    assert Ledger().add(values).statistics.first_nonfinite == (1, 2)


@needs_library
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.eye(300) * 1e-40, id="too-few-to-sample"),
        pytest.param(noise(8, 16, 30, 30).to(memory_format=torch.channels_last), id="strided"),
        pytest.param(noise(3, 70_000), id="more-units-than-a-page-has"),
        pytest.param(noise(4, 4).double() * 1e200, id="beyond-the-kernel"),
        pytest.param(torch.full((400, 400), torch.nan), id="nothing-finite"),
        pytest.param(noise(6, 6)[1:, 2:], id="offset"),
        pytest.param(noise(9, 9).to_sparse(), id="sparse"),
    ],
)
def test_what_is_unusual_is_found_as_well(tensor: Tensor) -> None:
    """Large, strided, out-of-range and not dense tensors equal `reduce` in every bit."""
    ledger = Ledger()
    first, again = ledger.add(tensor, 1), ledger.add(tensor, 1)
    expected = reduce(tensor, 1)
    assert first.statistics.histogram_sampled is expected.histogram_sampled
    assert oracle.bits(first.statistics) == oracle.bits(expected)
    assert oracle.bits(again.statistics) == oracle.bits(expected)


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize(
    "taken",
    [
        lambda statistics: pickle.loads(pickle.dumps(statistics)),
        copy.deepcopy,
        copy.copy,
        replace,
        lambda statistics: statistics,
    ],
)
def test_statistics_are_whole_whoever_asks_first(
    taken: Callable[[TensorStatistics], TensorStatistics], dim: int | None
) -> None:
    """Histogram and units, which are read out late, are there in a copy and a pickle as well."""
    ledger = Ledger()
    statistics = [ledger.add(noise(20, 30 + i), dim).statistics for i in range(3)]
    for i, seen in enumerate(statistics):
        assert oracle.bits(taken(seen)) == oracle.bits(reduce(noise(20, 30 + i), dim))
    merged = ledger.add(noise(20, 30), dim).statistics.merge(
        ledger.add(noise(9, 30), dim).statistics
    )
    expected = reduce(noise(20, 30), dim).merge(reduce(noise(9, 30), dim))
    assert oracle.bits(taken(merged)) == oracle.bits(expected)


def transformed(transform: Callable[..., Any], tensor: Tensor) -> bool:
    """Whether the kernel reads the wrapper that a functional transform has in hand."""
    is_read = []

    def function(inside: Tensor) -> Tensor:
        is_read.append(native.Results().read(inside, None) >= 0)
        return (inside * 2).sum()

    transform(function)(tensor)
    return is_read[0]


def freed() -> Tensor:
    """Return a tensor whose memory was given back, as FSDP does."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@needs_library
@pytest.mark.parametrize("asks_torch", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_numbers_in_memory_is_not_read(
    asks_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether torch describes tensors or we do, as for an older one: no stray byte is read."""
    if not asks_torch:
        monkeypatch.setattr(native, "_torchs_description", lambda: 0)
    for transform in (torch.vmap, torch.func.grad, torch.func.functionalize):
        assert not transformed(
            transform, torch.ones(3) if transform is not torch.vmap else noise(3, 2)
        )
    quantised = torch.quantize_per_tensor(noise(3), 0.1, 0, torch.qint8)
    for tensor in (
        torch.empty(3, device="meta"),
        noise(3, 3).to_sparse(),
        noise(3).to_mkldnn(),
        torch.nested.nested_tensor([noise(2), noise(3)]),
        quantised,
        freed(),
        torch.empty(0),
        torch.ones(3, dtype=torch.int32),
        torch.ones([1] * 17),
    ):
        results = native.Results()
        assert results.read(tensor, None) == native.NOT_READ
        assert results.read(noise(3), None) >= 0  # what comes after is read
        assert results.read_many([noise(3), tensor, noise(2)])[1] == native.NOT_READ
    complex_ = torch.complex(noise(3), noise(3)).conj()
    assert not native.is_plain(complex_.imag)  # a view that is yet to be negated
    strided = noise(4, 6, 2).permute(2, 0, 1)[:, ::2]
    found = native.Results().read(strided, -1, 2)
    assert found >= 0
    assert oracle.bits(Ledger().add(strided, -1).statistics) == oracle.bits(
        reduce(strided.clone(), 2)
    )


@needs_library
def test_pages_that_fill_up_and_pages_that_were_read_are_left_behind() -> None:
    """Statistics can be asked for at any time, and any number of tensors added after.

    More than a page has room for is read in several calls, in the same order.
    """
    many = [noise(n % 90 + 1, 40) for n in range(400)]
    together = [*Ledger().add_many([*many, noise(3, 3).to_sparse(), *many[:3]])]
    assert together.pop(400) is None
    truths = [oracle.bits(reduce(tensor)) for tensor in many]
    for entry, truth in zip(together, [*truths, *truths[:3]], strict=True):
        assert entry is not None
        assert oracle.bits(entry.statistics) == truth
    results = native.Results(words=256)  # room for three, and none of them is read by itself
    for place, truth in zip(results.read_many(many).tolist(), truths, strict=True):
        assert oracle.bits(results.statistics(None, place & native.PLACE)) == truth
    ledger = Ledger()
    many = [noise(n % 7 + 1, n % 5 + 1) for n in range(800)]
    entries = []
    for number, tensor in enumerate(many):
        entries.append(ledger.add(tensor, 1))
        if number % 100 == 3:
            assert oracle.bits(entries[number // 2].statistics) == oracle.bits(
                reduce(many[number // 2], 1)
            )
    for entry, tensor in zip(entries, many, strict=True):
        assert oracle.bits(entry.statistics) == oracle.bits(reduce(tensor, 1))


def test_what_has_no_values_is_refused() -> None:
    """A ledger refuses what `reduce` refuses, and goes on; what was read may change or end."""
    ledger, tensor = Ledger(), noise(20, 30)
    expected = oracle.bits(reduce(tensor, 1))
    entry = ledger.add(tensor, 1)
    with pytest.raises(UnsupportedTensorError, match="meta"):
        ledger.add(torch.empty(20, 30, device="meta"))  # like a tensor that was added
    tensor.fill_(7)
    del tensor
    assert oracle.bits(entry.statistics) == expected
    assert ledger.add(noise(3)).statistics.count == 3


def test_threads_add_to_one_ledger() -> None:
    """Tensors that several threads add at a time keep their own statistics."""
    ledger, many = Ledger(), [noise(n % 90 + 1, 40) for n in range(400)]
    expected = [oracle.bits(reduce(tensor, 1)) for tensor in many]
    found: dict[int, object] = {}

    def add(start: int) -> None:
        for number in range(start, len(many), 4):
            found[number] = ledger.add(many[number], 1)

    threads = [threading.Thread(target=add, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [oracle.bits(found[n].statistics) for n in range(len(many))] == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_goes_on_with_its_own_copy() -> None:
    """After a fork, parent and child add to the same ledger and neither sees the other."""
    ledger, tensor = Ledger(), noise(30, 30)
    before = ledger.add(tensor, 1)
    child = os.fork()
    if not child:
        own = ledger.add(tensor * 2, 1)
        same = own.statistics.max == 2 * before.statistics.max
        os._exit(0 if same else 1)
    own = ledger.add(tensor * 3, 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert own.statistics.max == reduce(tensor * 3).max
    assert oracle.bits(before.statistics) == oracle.bits(reduce(tensor, 1))
