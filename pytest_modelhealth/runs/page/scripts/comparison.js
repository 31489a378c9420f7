// The result of a comparison: the error through depth, and both sides of each layer.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const { make, text, drawn, panel } = page;

  page.kinds ??= {};
  page.kinds.comparison = function (anchor, result) {
    const rows = result.layers.map((layer, key) => {
      const name = layer.reference ?? layer.candidate;
      const worst = worstOf(layer);
      const words = [layer.label, layer.reference, layer.candidate, layer.type, layer.change, layer.diverged ? "differs" : "same"];
      return {
        key, layer, worst, name, label: layer.label, search: words.join(" ").toLowerCase(),
        mark: layer.diverged ? { kind: "found", tone: "", text: "differs" } : layer.reference === null || layer.candidate === null ? { kind: "shows", tone: "quiet", text: text.words(layer.change) } : null,
        isFound: layer.diverged, isUnseen: !layer.tensors.length,
      };
    });
    const table = page.layerTable({ rows, columns: COLUMNS.filter((column) => column.title !== RENAMED || rows.some(isRenamed)), sets: [], title: "Layers of both models", describe });
    return {
      evidence: Promise.resolve([]),
      parts: [
        panel("Error through depth", `${result.candidate} beside ${result.model}`, true, () => drawn(() => charts.errors(result))),
        panel("Layers", text.plural(rows.length, "layer"), true, () => table.element),
      ],
      reveal: table.reveal,
    };
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

  const COLUMNS = [
    { title: "layer", help: "name in the reference", set: "", isText: true, value: (row) => row.label },
    { title: RENAMED, help: "its name there", set: "", isText: true, value: (row) => row.layer.candidate, text: (row) => (row.layer.candidate === row.layer.reference ? "the same" : (row.layer.candidate ?? text.NONE)) },
    { title: "type", help: "class of the module", set: "", isText: true, value: (row) => row.layer.type, text: (row) => row.layer.type },
    { title: "change", help: "what became of it", set: "", isText: true, value: (row) => row.layer.change, text: (row) => text.words(row.layer.change) },
    { title: "tensor", help: "the one that differs most", set: "", isText: true, value: (row) => row.worst?.role ?? null, text: (row) => (row.worst ? [text.words(row.worst.role), row.worst.name].filter(Boolean).join(" ") : text.NONE) },
    of("error", "L2 norm of the difference by that of the reference", "error"),
    of("noise", "what rounding alone makes", "noise"),
    of("ratio", "error by noise", "ratio"),
    of("limit", "of the ratio", "limit"),
    of("abs error", "the greatest", "max_abs"),
    of("ULP", "the greatest difference in units in the last place", "max_ulp"),
  ];

  const TENSOR_HEADS = ["tensor", "reference", "candidate", "at", "error", "noise", "ratio", "limit", "abs error", "ULP", "cosine", "noise measured by"];

  function describe({ layer }) {
    const parts = layer.changed_parameters?.length
      ? [make("p", {}, `parameters that differ: ${layer.changed_parameters.join(", ")}`)]
      : [];
    for (const tensor of layer.tensors) if (tensor.problem) parts.push(make("p", { class: "bad" }, `${text.words(tensor.role)}: ${tensor.problem}`));
    if (!layer.tensors.length) return [...parts, make("p", { class: "aside" }, "Nothing of it was compared.")];
    const heads = TENSOR_HEADS.map((title, index) => make("th", { scope: "col", class: index ? "n" : null }, title));
    const lines = layer.tensors.map((tensor) => make(
      "tr", {},
      make("th", { scope: "row", class: tensor.diverged ? "bad" : null }, [text.words(tensor.role), tensor.name].filter(Boolean).join(" ")),
      [exactly(tensor.reference), exactly(tensor.found), place(tensor.at), ...["error", "noise", "ratio", "limit", "max_abs", "max_ulp"].map((key) => tensor[key])]
        .map((value) => make("td", { class: "n" }, text.number(value))),
      make("td", { class: "n" }, exactly(tensor.cosine)),
      make("td", { class: "n" }, tensor.source || text.NONE),
    ));
    return [...parts, make("p", { class: "aside" }, "Reference and candidate: the two values where they differ most."),
      make("div", { class: "frame" }, make("table", {}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, lines)))];
  }

  function place(at) {
    if (at === null || at === undefined) return null;
    return Array.isArray(at) ? `[${at.join(", ")}]` : String(at);
  }

  function exactly(value) {
    return value === null || value === undefined ? text.NONE : String(value);
  }
})();
