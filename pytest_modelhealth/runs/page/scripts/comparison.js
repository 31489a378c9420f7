// The result of a comparison: both sides of each layer.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const { make, text } = page;

  page.kinds ??= {};
  page.kinds.comparison = function (anchor, result) {
    const rows = result.layers.map((layer, key) => {
      const words = [layer.label, layer.reference, layer.candidate, layer.type, layer.change, layer.diverged ? "differs" : "same"];
      const isLone = layer.reference === null || layer.candidate === null;
      return {
        key, layer, worst: worstOf(layer), name: layer.reference ?? layer.candidate, label: layer.label, search: words.join(" ").toLowerCase(),
        mark: layer.diverged ? { kind: "found", tone: "", text: "differs" } : isLone ? { kind: "shows", tone: "quiet", text: text.words(layer.change) } : null,
        isFound: layer.diverged, isOpen: (layer.reference ?? layer.candidate) === result.divergence?.layer, isUnseen: !layer.tensors.length,
      };
    });
    return page.layerTable({ rows, columns: COLUMNS.filter((column) => column.title !== RENAMED || rows.some(isRenamed)), sets: [], title: "Layers of both models", describe });
  };

  // The tensor that differs most: by the noise where that is known.
  function worstOf(layer) {
    const size = (tensor) => [tensor.diverged ? 1 : 0, tensor.ratio ?? (tensor.error ? Infinity : -1), tensor.error ?? -1];
    return layer.tensors.reduce((most, tensor) => {
      if (most === null) return tensor;
      const [a, b] = [size(tensor), size(most)];
      const at = a.findIndex((each, index) => each !== b[index]);
      return at >= 0 && a[at] > b[at] ? tensor : most;
    }, null);
  }

  const RENAMED = "in the candidate";
  const isRenamed = ({ layer }) => layer.reference !== null && layer.candidate !== null && layer.reference !== layer.candidate;

  const of = (title, help, key) => ({
    title, help, set: "", value: (row) => row.worst?.[key] ?? null, text: (row) => text.number(row.worst?.[key]),
    isFound: key === "ratio" || key === "error" ? (row) => row.layer.diverged : undefined,
  });
  const told = (title, help, value, shown = value) => ({ title, help, set: "", isText: true, value, text: shown });

  const COLUMNS = [
    told("layer", "name in the reference", (row) => row.label),
    told(RENAMED, "its name there", (row) => row.layer.candidate, ({ layer }) => (layer.candidate === layer.reference ? "the same" : (layer.candidate ?? text.NONE))),
    told("type", "class of the module", (row) => row.layer.type),
    told("change", "what became of it", (row) => row.layer.change, (row) => text.words(row.layer.change)),
    told("tensor", "the one that differs most", (row) => row.worst?.role ?? null, (row) => (row.worst ? text.called(row.worst) : text.NONE)),
    of("error", "L2 norm of the difference by that of the reference", "error"),
    of("noise", "what rounding alone makes", "noise"),
    of("ratio", "error by noise", "ratio"),
    of("limit", "of the ratio", "limit"),
    of("abs error", "the greatest", "max_abs"),
  ];

  const HEADS = page.heads(["tensor", "reference", "candidate", "at", "error", "noise", "ratio", "limit", "abs error", "noise measured by"], 1);
  const exactly = (value) => String(value ?? text.NONE);

  function describe({ layer }) {
    const parts = layer.changed_parameters?.length ? [make("p", {}, `parameters that differ: ${layer.changed_parameters.join(", ")}`)] : [];
    for (const tensor of layer.tensors) if (tensor.problem) parts.push(make("p", { class: "bad" }, `${text.words(tensor.role)}: ${tensor.problem}`));
    if (!layer.tensors.length) return [...parts, make("p", { class: "aside" }, "Nothing of it was compared.")];
    const lines = layer.tensors.map((tensor) => [
      make("th", { scope: "row", class: tensor.diverged ? "bad" : null }, text.called(tensor)),
      page.cells([
        exactly(tensor.reference), exactly(tensor.found), Array.isArray(tensor.at) ? `[${tensor.at.join(", ")}]` : exactly(tensor.at),
        ...["error", "noise", "ratio", "limit", "max_abs"].map((key) => text.number(tensor[key])),
        tensor.source || text.NONE,
      ]),
    ].flat());
    return [...parts, make("p", { class: "aside" }, "Reference and candidate: the two values where they differ most."), page.table(HEADS, lines)];
  }
})();
