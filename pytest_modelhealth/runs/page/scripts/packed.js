// The blocks of data: unpacked when they are first asked for.
(() => {
  "use strict";
  const page = (globalThis.page ??= {});
  const LAYERS_A_BLOCK = 500; // as in blocks.py
  const unpacked = new Map();

  // Returns a promise of a result, or null where its numbers are not on the page.
  page.result = (anchor) => block(`data-${anchor}`);

  // Puts the charts, which were drawn and escaped when the page was written, where they belong.
  page.showCharts = async function (view) {
    const [evidence, panels] = (await block(`charts-${view.id}`)) ?? ["", ""];
    view.querySelector(".evidence").insertAdjacentHTML("beforeend", evidence);
    view.querySelector(".more").insertAdjacentHTML("beforeend", panels);
  };

  // Gives the tensors of the `index`-th layer of a result their histograms; says whether it had any.
  page.addHistograms = async function (anchor, index, layer) {
    const blocks = await block(`bins-${anchor}-${Math.floor(index / LAYERS_A_BLOCK)}`);
    const bins = blocks?.[index % LAYERS_A_BLOCK];
    if (!bins) return false;
    layer.tensors.forEach((tensor, nth) => {
      tensor.bins = bins[nth] ?? null;
    });
    return true;
  };

  function block(id) {
    if (!unpacked.has(id)) unpacked.set(id, unpack(document.getElementById(id)));
    return unpacked.get(id);
  }

  async function unpack(element) {
    if (element === null) return null;
    const letters = atob(element.textContent);
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }
})();
