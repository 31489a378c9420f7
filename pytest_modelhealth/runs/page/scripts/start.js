// The page: the list of tests, the chosen result, light and dark. Joined last.
(() => {
  "use strict";
  const { make, text } = globalThis.page;
  const FILES_OPEN_UP_TO = 400; // results, up to which all are listed at once
  const MARKS = { bad: "\u2715", unsure: "?", good: "\u2713" };

  const views = [...document.querySelectorAll("main > .view")];
  const rows = [...document.querySelectorAll(".overview tr[data-result]")];
  const opened = new Map(); // anchor: promise of what was made of its numbers

  document.documentElement.classList.add("scripted");
  document.querySelectorAll(".overview a").forEach((link) => link.firstChild.replaceWith(...page.breakable(link.firstChild.textContent)));
  addThemes();
  listTests();
  addEventListener("hashchange", () => show(true));
  addEventListener("click", (event) => event.target.closest?.("svg a")?.getAttribute("href") === location.hash && show(true));
  addEventListener("load", () => location.hash.includes("/") || scrollTo({ top: 0, behavior: "instant" })); // the browser has gone to the section
  addEventListener("beforeprint", openTests);
  show(false);

  // Shows the result that the address names: "#t3-0", or "#t3-0/encoder.0" for a layer of it.
  async function show(isFocused) {
    const hash = location.hash.slice(1);
    const cut = hash.indexOf("/");
    const anchor = cut < 0 ? hash : hash.slice(0, cut);
    const chosen = views.find((view) => view.id === anchor) ?? (anchor === "main" ? null : first());
    if (chosen === null) return;
    for (const view of views) view.hidden = view !== chosen;
    for (const link of document.querySelectorAll("#tests a")) {
      if (link.hash === `#${chosen.id}`) {
        link.setAttribute("aria-current", "page");
        link.scrollIntoView({ block: "nearest" });
      } else link.removeAttribute("aria-current");
    }
    const box = document.querySelector("#tests .box");
    if (isFocused && matchMedia("(max-width: 900px)").matches) box.open = false;
    if (cut < 0) scrollTo({ top: 0, behavior: "instant" });
    if (isFocused) {
      chosen.setAttribute("tabindex", "-1");
      chosen.focus({ preventScroll: true });
    }
    if (!chosen.classList.contains("result") || chosen.dataset.kind === "failure") return; // which has no numbers
    const made = await open(chosen);
    if (cut >= 0) made?.reveal(decoded(hash.slice(cut + 1)));
  }

  function decoded(name) {
    try {
      return decodeURIComponent(name);
    } catch {
      return name;
    }
  }

  function first() {
    return views.find((view) => view.dataset.tone === "bad" && view.classList.contains("result")) ?? views[0];
  }

  function open(view) {
    if (!opened.has(view.id)) opened.set(view.id, fill(view));
    return opened.get(view.id);
  }

  async function fill(view) {
    const more = view.querySelector(".more");
    const say = (sentence) => more.append(make("p", { class: "notice" }, sentence));
    if (!("DecompressionStream" in globalThis)) {
      say("This browser is too old to unpack the numbers of the layers; Chrome 80, Firefox 113 and Safari 16.4 can.");
      return null;
    }
    await page.showCharts(view);
    const result = await page.result(view.id);
    if (result === null) {
      say("The layers of this result are not on the page, to keep it under 10 MB: run the test alone, or see the file of --modelhealth-json.");
      return null;
    }
    const table = page.kinds[result.kind]?.(view.id, result) ?? null;
    if (table) {
      const summary = make("summary", {}, make("h3", {}, "Layers"), make("span", { class: "aside" }, table.remark));
      more.append(make("section", { class: "panel" }, make("details", { open: true }, summary, table.element)));
    }
    view.querySelector(".facts").after(sections(view));
    return table;
  }

  // Links to the parts of a result: some are long.
  function sections(view) {
    const parts = [...view.querySelectorAll(":scope > .panel, .more > .panel")].map((part) => make("button", {
      type: "button",
      click() {
        const details = part.querySelector(":scope > details");
        if (details) details.open = true;
        part.scrollIntoView({ block: "start" });
        details?.querySelector("summary").focus({ preventScroll: true });
      },
    }, part.querySelector("h3").textContent));
    return make("nav", { class: "sections", "aria-label": "Parts of this result" }, parts);
  }

  function openTests() {
    for (const details of document.querySelectorAll("#tests .box")) details.open = true;
  }

  // The tests at the left: what failed first, the rest by file.
  function listTests() {
    const nav = document.getElementById("tests");
    const counts = new Map();
    for (const row of rows) counts.set(verdictOf(row), (counts.get(verdictOf(row)) ?? 0) + 1);
    const wanted = new Set();
    const list = make("div");
    const count = make("p", { class: "count", role: "status" });
    const search = make("input", { type: "search", class: "search", placeholder: "Filter tests", "aria-label": "Filter tests", input: fillList });
    const gravest = ["bad", "unsure", "good"];
    const toneOf = (verdict) => gravest.indexOf(rows.find((row) => verdictOf(row) === verdict).dataset.tone);
    const verdicts = [...counts].sort(([a], [b]) => toneOf(a) - toneOf(b));
    const chips = verdicts.map(([verdict, number]) => {
      const chip = make("button", {
        type: "button", class: "chip", "aria-pressed": "false",
        click() {
          if (!wanted.delete(verdict)) wanted.add(verdict);
          chip.setAttribute("aria-pressed", String(wanted.has(verdict)));
          fillList();
        },
      }, `${verdict} ${text.number(number)}`);
      return chip;
    });
    const box = make(
      "details", { class: "box", open: !matchMedia("(max-width: 900px)").matches },
      make("summary", {}, `Tests (${text.number(rows.length)})`), search,
      chips.length > 1 ? make("div", { class: "kinds", role: "group", "aria-label": "Verdicts" }, chips) : null,
      make("ul", {}, make("li", {}, make("a", { href: "#overview" }, make("span", { class: "dot", "aria-hidden": "true" }, "\u2261"), make("span", { class: "name" }, "All tests")))),
      list, count,
    );
    nav.append(box);
    nav.hidden = false;
    nav.addEventListener("keydown", walk);
    fillList();

    function fillList() {
      const words = search.value.trim().toLowerCase().split(/\s+/);
      const found = rows.filter((row) => {
        const told = row.textContent.toLowerCase();
        return words.every((word) => told.includes(word)) && (!wanted.size || wanted.has(verdictOf(row)));
      });
      list.replaceChildren(...grouped(found.slice(0, FILES_OPEN_UP_TO)));
      const rest = found.length - FILES_OPEN_UP_TO;
      count.textContent = found.length === 0 ? "No test matches." : rest > 0 ? `and ${text.number(rest)} more: filter to find them` : "";
      const current = views.find((view) => !view.hidden);
      list.querySelectorAll("a").forEach((link) => link.hash === `#${current?.id}` && link.setAttribute("aria-current", "page"));
    }

    function walk(event) {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      const links = [...nav.querySelectorAll("a")];
      const at = links.indexOf(document.activeElement);
      if (at < 0 && document.activeElement !== search) return;
      (at + step < 0 ? search : links[at + step])?.focus();
      event.preventDefault();
    }
  }

  function verdictOf(row) {
    return row.querySelector(".pill").textContent;
  }

  function grouped(found) {
    const files = new Map();
    for (const row of found) files.set(row.dataset.file, [...(files.get(row.dataset.file) ?? []), row]);
    return [...files].flatMap(([file, own]) => [make("p", { class: "file" }, file), make("ul", {}, own.map(entry))]);
  }

  function entry(row) {
    const nth = row.querySelector("th .aside")?.textContent;
    const { tone, failed } = row.dataset;
    const isOwnFailure = failed !== undefined && tone !== "bad" && !nth; // of an assert of its own
    return make("li", {}, make(
      "a", { href: `#${row.dataset.result}`, title: row.querySelector(".found").textContent },
      make("span", { class: `dot ${tone}`, "aria-hidden": "true" }, MARKS[tone]),
      make("span", { class: "name" }, page.breakable(row.dataset.name), nth ? make("span", { class: "aside" }, ` ${nth}`) : "",
        isOwnFailure ? make("span", { class: "bad" }, " failed") : "",
        make("span", { class: "aloud" }, `, ${verdictOf(row)}`)),
    ));
  }

  // Light or dark: what the system says, until someone chooses.
  function addThemes() {
    const root = document.documentElement;
    const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    const button = make("button", {
      type: "button", class: "theme",
      click() {
        root.dataset.theme = isDark() ? "light" : "dark";
        button.textContent = isDark() ? "Light theme" : "Dark theme";
      },
    }, isDark() ? "Light theme" : "Dark theme");
    document.querySelector(".top").append(button);
  }
})();
