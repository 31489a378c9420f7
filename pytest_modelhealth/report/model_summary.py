"""`ModelSummary`: the layers of a model as a tree, with shapes, parameters and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_modelhealth.report.codec import encode
from pytest_modelhealth.report.verdict import Renderer


@dataclass(frozen=True, repr=False)
class ModelSummary:
    """What a model consists of and what it costs: `str` is a table, ``rows`` make a data frame.

    Each row is a dictionary with the same keys; ``pandas.DataFrame(summary.rows)`` takes them. What
    was not measured is ``None``. Of a layer itself, without those inside, it has:

    - ``name``, ``label`` (what to show for it), ``depth`` (0 is the model), ``type``, ``status``,
      ``reason``, ``functional`` and ``calls``, as in `LayerRecord`;
    - ``input_shape`` and ``output_shape`` of the first tensor that it took and returned, and
      ``dtype`` of the latter;
    - ``parameters``, ``trainable`` and ``frozen``: numbers of elements. A parameter of several
      layers counts at the first; the others have it in ``shared``, by their own name for it:
      ``{"weight": "embedding.weight"}``;
    - ``parameter_bytes``, and ``activation_bytes`` of what its calls returned, the mean of several
      batches;
    - ``multiply_adds`` of its forward, by torch's counter, and ``saved_bytes``: the storages that
      autograd keeps for the backward pass, each at the first layer that has it saved.

    With the layers inside it has ``all_parameters``, ``all_trainable``, ``all_activation_bytes``
    (of those that hold no others), ``all_multiply_adds`` and ``all_saved_bytes``.

    The totals are ``layers``, ``parameters``, ``trainable``, ``frozen``, ``parameter_bytes``,
    ``activation_bytes``, ``multiply_adds``, ``saved_bytes``, ``peak_bytes`` (the most that tensors
    held at one time, with ``held_bytes`` of parameters, buffers and batch in it), and
    ``cuda_peak_bytes`` by CUDA's allocator.

    Args:
        model_type: class name of the model.
        run: what was run, a phrase.
        rows: a row for each layer, a layer before those in it, siblings in execution order.
        totals: the numbers of the whole model.
        backward: whether loss and backward pass are in the peak.
        notes: what a reader should know, a sentence each.
        depth: show layers in at most so many others, ``None`` for all.
        max_rows: show at most so many lines, ``None`` for all.
        renderer: gives the formats.
    """

    model_type: str
    run: str
    rows: Sequence[Mapping[str, Any]]
    totals: Mapping[str, int | None]
    backward: bool
    notes: tuple[str, ...]
    depth: int | None = field(metadata={"json": False})
    max_rows: int | None = field(metadata={"json": False})
    renderer: Renderer = field(compare=False, metadata={"json": False})

    def render(self, *, width: int = 100) -> str:
        """Return the table, in lines of at most `width` characters."""
        text: str = self.renderer("model_summary", "document")(self).text(width=width)
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and strings."""
        data: dict[str, Any] = encode(self)
        return data

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        line: str = self.renderer("model_summary", "document")(self).headline
        return line

    def _repr_html_(self) -> str:
        html: str = self.renderer("model_summary", "document")(self).html()
        return html
