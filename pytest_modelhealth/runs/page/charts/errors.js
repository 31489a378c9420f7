// How far a candidate is from its reference through depth, beside what rounding explains.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const FORWARD = new Set(["activations", "outputs"]);
  const BACKWARD = new Set(["gradients", "parameter_gradients"]);

  charts.errors = function (comparison) {
    const { COLOURS, nothing } = charts.drawing;
    const layers = (comparison.layers ?? []).filter(
      (layer) => (layer.tensors ?? []).length || layer.reference === null || layer.candidate === null || isCulprit(layer),
    );
    if (!layers.length) return nothing("errors", "No layers were compared.");
    const rows = layers.map((layer) => ({
      name: layer.reference ?? layer.candidate,
      label: charts.drawing.labelOf(layer, layer.reference ?? layer.candidate),
      isCulprit: isCulprit(layer),
      isTinted: layer.diverged,
      note: layer.reference === null ? "(+)" : layer.candidate === null ? "(−)" : "",
    }));
    const forward = layers.map((layer) => worst(layer, (tensor) => FORWARD.has(tensor.role)));
    const backward = layers.map((layer) => worst(layer, (tensor) => BACKWARD.has(tensor.role)));
    const panel = (title, tensors, series, empty) => ({
      title, empty,
      ranges: { name: "explained by rounding", values: tensors.map(allowed) },
      series: [{ name: "error", ...series, values: tensors.map(seen) }],
    });
    const panels = [
      panel("activations: relative error", forward, { key: "activations", colour: COLOURS.accent, shape: "circle" }, "no activations were compared"),
      panel("gradients: relative error", backward, { key: "gradients", colour: COLOURS.accent2, shape: "triangle", dash: "4 2" }, "no gradients were compared"),
    ];
    const footnote = rows.some((row) => row.note) ? "(+) only in the candidate, (−) only in the reference" : "";
    return charts.rows("errors", rows, panels, sentence(), title, footnote);

    function isCulprit({ reference, candidate }) {
      const found = comparison.divergence;
      if (!found) return false;
      return reference === null ? candidate === found.layer || candidate === found.candidate : reference === found.layer;
    }

    function title(index) {
      const { number } = charts.drawing;
      const layer = layers[index];
      const lines = [rows[index].label];
      if (layer.reference === null) lines.push("only in the candidate");
      if (layer.candidate === null) lines.push("only in the reference");
      for (const [name, tensor] of [["activations", forward[index]], ["gradients", backward[index]]]) {
        if (!tensor) continue;
        lines.push(`${name}: error ${number(tensor.error)}, noise ${number(tensor.noise)}, limit ${number(allowed(tensor))}`);
        if (tensor.problem) lines.push(tensor.problem);
      }
      if (rows[index].isCulprit) lines.push(comparison.divergence.story || "the first divergence");
      return lines.join("\n");
    }

    function sentence() {
      const { number, plural } = charts.drawing;
      const found = comparison.divergence;
      const parts = [];
      if (found) {
        const at = rows.findIndex((row) => row.isCulprit);
        const tensor = at < 0 ? undefined : [forward[at], backward[at]].find((one) => one?.diverged) ?? forward[at] ?? backward[at];
        const size = tensor ? `: error ${number(tensor.error)} of ${number(allowed(tensor))} that rounding explains` : "";
        parts.push(`first divergence at ${found.label || found.layer}${size}`);
        parts.push(`${plural(layers.filter((layer) => layer.diverged).length, "layer")} of ${layers.length} diverged`);
      } else {
        parts.push(`no divergence in ${plural(layers.length, "layer")}`);
        const most = charts.drawing.extent([...forward, ...backward].map((tensor) => tensor?.error ?? 0))[1];
        parts.push(`greatest relative error ${number(most)}`);
      }
      const added = rows.filter((row) => row.note === "(+)").length;
      const removed = rows.filter((row) => row.note === "(−)").length;
      if (added) parts.push(`${plural(added, "layer")} only in the candidate`);
      if (removed) parts.push(`${plural(removed, "layer")} only in the reference`);
      return parts.join("; ");
    }
  };

  // The tensor furthest beyond its noise: a ratio of null is infinite.
  function worst(layer, isMeant) {
    let found;
    for (const tensor of layer.tensors ?? []) {
      if (isMeant(tensor) && (found === undefined || badness(tensor) > badness(found))) found = tensor;
    }
    return found;
  }

  const badness = ({ ratio }) => ratio ?? Infinity;

  const allowed = (tensor) => {
    const { isNumber } = charts.drawing;
    return tensor && isNumber(tensor.noise) && isNumber(tensor.limit) ? tensor.noise * tensor.limit : 0;
  };

  function seen(tensor) {
    if (!tensor) return undefined;
    if (charts.drawing.isNumber(tensor.error)) return { value: tensor.error, bad: false };
    return { value: undefined, bad: true };
  }
})();
