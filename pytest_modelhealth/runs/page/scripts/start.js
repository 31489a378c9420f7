// The page: the list of tests, the chosen result, light and dark. Joined last.
(() => {
  "use strict";
  const { make, text } = globalThis.page;
  const FILES_OPEN_UP_TO = 400; // results, up to which all are listed at once
  const MARKS = { bad: "\u2715", unsure: "?", good: "\u2713", quiet: "\u00b7" };

  const views = [...document.querySelectorAll("main > .view")];
  const rows = [...document.querySelectorAll(".overview tbody tr")].reduce(told, []);
  const opened = new Map(); // anchor: promise of what was made of its numbers

  document.documentElement.classList.add("scripted");
  document.querySelectorAll(".overview a").forEach((link) => link.replaceChildren(...page.breakable(link.textContent)));
  addThemes();
  listTests();
  addEventListener("hashchange", () => show(true));
  addEventListener("click", (event) => event.target.closest?.("svg a")?.getAttribute("href") === location.hash && show(true));
  addEventListener("load", () => location.hash.includes("/") || scrollTo({ top: 0, behavior: "instant" })); // the browser has gone to the section
  addEventListener("beforeprint", () => document.querySelectorAll("#tests .box, .panel > details").forEach((each) => (each.open = true)));
  show(false);

  // Shows the result that the address names: "#t3-0", or "#t3-0/encoder.0" for a layer of it.
  async function show(isFocused) {
    const hash = location.hash.slice(1);
    const cut = hash.indexOf("/");
    const anchor = cut < 0 ? hash : hash.slice(0, cut);
    const chosen = views.find((view) => view.id === anchor) ?? made(anchor) ?? (anchor === "main" ? null : first());
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
    const table = await open(chosen);
    if (cut >= 0) table?.reveal(decoded(hash.slice(cut + 1)));
  }

  // What the overview says of a test: its heading, its link, its verdict.
  function told(rows, line) {
    const link = line.querySelector("a");
    if (!link) rows.group = line.textContent;
    else rows.push({ line, link, group: rows.group, name: link.textContent, pill: line.querySelector(".pill"), nth: line.querySelector("th .aside")?.textContent });
    return rows;
  }

  // The section of a test of which there is nothing to say but its numbers.
  function made(anchor) {
    const row = rows.find(({ link }) => link.hash === `#${anchor}`);
    if (!row) return undefined;
    const where = make("p", { class: "where", id: `${anchor}-where` }, make("span", { class: "code" }, [row.group, row.name].join("::")));
    const head = make("h2", {}, row.pill.cloneNode(true), ` ${row.line.querySelector(".found").textContent}`);
    const view = make(
      "section", { id: anchor, class: "view result", "aria-labelledby": where.id, "data-tone": toneOf(row) },
      where, head, make("p", { class: "facts aside" }), make("div", { class: "evidence" }), make("div", { class: "more" }),
    );
    views.push(view);
    document.querySelector("main").append(view);
    return view;
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
    const held = await page.result(view.id);
    if (held === null) {
      say("The layers of this result are not on the page, to keep it small: run the test alone, or see the file of --modelhealth-json.");
      return null;
    }
    const { result, facts, charts } = held;
    if (!view.querySelector(".facts *")) view.querySelector(".facts").innerHTML = facts; // drawn and escaped, like charts
    view.querySelector(".evidence").insertAdjacentHTML("beforeend", charts?.[0] ?? "");
    more.insertAdjacentHTML("beforeend", charts?.[1] ?? "");
    const table = page.kinds[result.kind]?.(view.id, result) ?? null;
    if (table) {
      const summary = make("summary", {}, make("h3", {}, "Layers"), make("span", { class: "aside" }, table.remark));
      more.append(make("section", { class: "panel" }, make("details", { open: true }, summary, table.element)));
      table.showOpen();
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

  // The tests at the left: what failed first, the rest by file.
  function listTests() {
    const nav = document.getElementById("tests");
    const counts = page.grouped(rows, verdictOf);
    const wanted = new Set();
    const list = make("div");
    const count = make("p", { class: "count", role: "status" });
    const search = make("input", { type: "search", class: "search", placeholder: "Filter tests", "aria-label": "Filter tests", input: fillList });
    const gravity = ([, [row]]) => ["bad", "unsure", "good", "quiet"].indexOf(toneOf(row));
    const chips = [...counts].sort((a, b) => gravity(a) - gravity(b)).map(([verdict, { length }]) => {
      const chip = make("button", {
        type: "button", class: "chip", "aria-pressed": "false",
        click() {
          if (!wanted.delete(verdict)) wanted.add(verdict);
          chip.setAttribute("aria-pressed", String(wanted.has(verdict)));
          fillList();
        },
      }, `${verdict} ${text.whole(length)}`);
      return chip;
    });
    const box = make(
      "details", { class: "box", open: !matchMedia("(max-width: 900px)").matches },
      make("summary", {}, `Tests (${text.whole(rows.length)})`), search,
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
        const told = `${row.group} ${row.line.textContent}`.toLowerCase();
        return words.every((word) => told.includes(word)) && (!wanted.size || wanted.has(verdictOf(row)));
      });
      list.replaceChildren(...grouped(found.slice(0, FILES_OPEN_UP_TO)));
      const rest = found.length - FILES_OPEN_UP_TO;
      count.textContent = found.length === 0 ? "No test matches." : rest > 0 ? `and ${text.whole(rest)} more: filter to find them` : "";
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
    return row.pill.textContent;
  }

  function toneOf(row) {
    return row.pill.classList[1];
  }

  function grouped(found) {
    return [...page.grouped(found, (row) => row.group)].flatMap(([group, own]) => [make("p", { class: "file" }, group), make("ul", {}, own.map(entry))]);
  }

  function entry(row) {
    const tone = toneOf(row);
    return make("li", {}, make(
      "a", { href: row.link.hash, title: row.line.querySelector(".found").textContent },
      make("span", { class: `dot ${tone}`, "aria-hidden": "true" }, MARKS[tone]),
      make("span", { class: "name" }, page.breakable(row.name), row.nth ? make("span", { class: "aside" }, ` ${row.nth}`) : "",
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
