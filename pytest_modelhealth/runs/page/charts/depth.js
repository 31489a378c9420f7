// How large values and gradients are through the depth of a model.
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  charts.depth = function (layers, violations = []) {
    const { COLOURS, labelOf, nothing } = charts.drawing;
    const shown = measured(layers, violations);
    if (!shown.length) return nothing("depth", "No activations and no gradients were measured.");
    const culprit = violations[0]?.layer;
    const found = new Set(violations.map((violation) => violation.layer));
    const rows = shown.map((layer) => ({
      name: layer.name,
      label: labelOf(layer),
      isCulprit: layer.name === culprit,
      isFound: found.has(layer.name),
    }));
    const of = (role, read) => shown.map((layer) => value(layer, role, read));
    const scale = {
      key: "activations", name: "rms", colour: COLOURS.accent, shape: "circle",
      values: of("activations", rms),
      whiskers: { name: "greatest |x|", values: shown.map((layer) => greatest(layer, "activations")) },
    };
    const gradients = {
      key: "gradients", name: "of activations", colour: COLOURS.accent, shape: "circle",
      values: of("gradients", norm),
    };
    const parameters = {
      key: "parameter_gradients", name: "of parameters", colour: COLOURS.accent2, shape: "diamond", dash: "4 2",
      values: of("parameter_gradients", norm),
    };
    const panels = [
      { title: "activation scale", series: [scale], empty: "no activations were measured" },
      { title: "gradient norm (L2)", series: [parameters, gradients], empty: "no gradients were measured" },
    ];
    const flowing = gradients.values.some((seen) => seen !== undefined) ? gradients : parameters;
    const finding = sentence(rows, scale.values, flowing.values, violations);
    return charts.rows("depth", rows, panels, finding, (index) => title(rows[index], index));

    function title(row, index) {
      const { number } = charts.drawing;
      const lines = [row.label];
      const say = (name, seen) => {
        if (seen === undefined) return;
        lines.push(`${name} ${seen.value === undefined ? "no number" : number(seen.value)}${seen.bad ? ", with NaN or inf" : ""}`);
      };
      say("activation rms", scale.values[index]);
      if (scale.whiskers.values[index] > 0) lines.push(`greatest |x| ${number(scale.whiskers.values[index])}`);
      say("gradient norm", gradients.values[index]);
      say("parameter gradient norm", parameters.values[index]);
      for (const violation of violations) if (violation.layer === row.name) lines.push(violation.message);
      return lines.join("\n");
    }
  };

  // The layers that hold no other, and those others that have parameters or a finding of their own.
  function measured(layers, violations) {
    const found = new Set(violations.map((violation) => violation.layer));
    const containers = charts.drawing.containersOf(layers);
    return layers.filter((layer) => {
      const roles = new Set((layer.tensors ?? []).map((tensor) => tensor.role));
      const isSeen = roles.has("activations") || roles.has("gradients") || roles.has("parameter_gradients");
      return isSeen && (!containers.has(layer.name) || roles.has("parameter_gradients") || found.has(layer.name));
    });
  }

  // Returns {value, bad} of the tensors of a role together; undefined where there are none.
  function value(layer, role, read) {
    const tensors = (layer.tensors ?? []).filter((tensor) => tensor.role === role);
    if (!tensors.length) return undefined;
    const bad = tensors.some((tensor) => tensor.nan > 0 || tensor.inf > 0);
    return { value: read(tensors), bad };
  }

  function norm(tensors) {
    const known = tensors.filter(charts.drawing.hasFinite).map((tensor) => tensor.norm).filter(charts.drawing.isNumber);
    return known.length ? Math.hypot(...known) : undefined;
  }

  function rms(tensors) {
    const whole = norm(tensors);
    const count = tensors.reduce((sum, { count, nan, inf }) => sum + (count ?? 0) - (nan ?? 0) - (inf ?? 0), 0);
    return whole !== undefined && count > 0 ? whole / Math.sqrt(count) : undefined;
  }

  function greatest(layer, role) {
    let most = 0;
    for (const { role: of, min, max } of layer.tensors ?? []) {
      if (of === role) most = Math.max(most, Math.abs(min ?? 0), Math.abs(max ?? 0));
    }
    return most;
  }

  function sentence(rows, scale, gradients, violations) {
    const { number, plural } = charts.drawing;
    const parts = [];
    const change = (name, values, order) => {
      const seen = order.filter((index) => values[index]?.value !== undefined);
      if (!seen.length) return;
      const [first, last] = [seen[0], seen.at(-1)];
      const [from, to] = [values[first].value, values[last].value];
      if (first === last) parts.push(`${name} ${number(from)} at ${rows[first].label}`);
      else {
        const places = `from ${rows[first].label} to ${rows[last].label}`;
        if (to === from) parts.push(`${name} is ${number(to)} ${places}`);
        else parts.push(`${name} ${to > from ? "rises" : "falls"} from ${number(from)} at ${rows[first].label} to ${number(to)} at ${rows[last].label}`);
      }
      const zeros = seen.filter((index) => values[index].value === 0).length;
      if (zeros) parts.push(`${name} is zero in ${plural(zeros, "layer")}`);
    };
    const order = rows.map((_, index) => index);
    change("activation rms", scale, order);
    change("gradient norm", gradients, order.toReversed());
    const bad = order.filter((index) => scale[index]?.bad || gradients[index]?.bad).length;
    if (bad) parts.push(`NaN or infinity in ${plural(bad, "layer")}`);
    const worst = violations[0];
    if (worst) parts.push(`culprit ${worst.label || worst.layer}: ${charts.drawing.words(worst.check)}`);
    return parts.join("; ") || "no finite activations and gradients";
  }
})();
