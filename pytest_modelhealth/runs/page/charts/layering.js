// Places a directed graph in rows: longest ways, few crossings, straight lines.
//
// After Sugiyama, Tagawa and Toda (1981): edges that close a cycle are turned for the time being, a
// node stands below all that feed it, long edges are led through every row between, rows are sorted
// by barycentres, and places in a row are those nearest to the neighbours' (by isotonic regression).
(() => {
  "use strict";
  const charts = (globalThis.charts ??= {});

  const SORTINGS = 12;
  const PLACINGS = 24;
  const BETWEEN = 18; // pixels between boxes of a row
  const LANE = 14; // width of a passing edge
  const PULL = { way: 10, through: 4, plain: 1 };

  // `widths`: pixels of each node. `edges`: [{from, to, style}]; those of one style that leave a node
  // together share their way. Returns {rows: number of them, rowOf: [row], xOf: [centre], width,
  // routes: [{points: [[x, row]], isBack}]}, a route for each edge, from the upper node to the lower.
  charts.layered = function (widths, edges) {
    const back = closing(widths.length, edges);
    const rowOf = longestWays(widths.length, edges, back);
    const graph = led(widths, edges, back, rowOf);
    sort(graph);
    place(graph);
    const [least, most] = charts.drawing.extent(graph.rows.flatMap((row) => row.flatMap((v) => [graph.x[v] - graph.width[v] / 2, graph.x[v] + graph.width[v] / 2])));
    const shift = Number.isFinite(least) ? -least : 0;
    const x = graph.x.map((value) => value + shift);
    const routes = graph.routes.map((route, index) => ({
      points: route.map((vertex) => [x[vertex], graph.row[vertex]]),
      isBack: back[index],
    }));
    return { rows: graph.rows.length, rowOf, xOf: x.slice(0, widths.length), width: Math.max(0, most - least), routes };
  };

  // Which edges lead back to a node that is still being walked, from the sources on.
  function closing(count, edges) {
    const leaving = Array.from({ length: count }, () => []);
    const entered = new Array(count).fill(0);
    edges.forEach(({ from, to }, index) => {
      if (from === to) return;
      leaving[from].push(index);
      entered[to] += 1;
    });
    const back = new Array(edges.length).fill(false);
    const state = new Uint8Array(count); // 1 being walked, 2 done
    const walk = (start) => {
      if (state[start]) return;
      state[start] = 1;
      const stack = [[start, 0]];
      while (stack.length) {
        const top = stack.at(-1);
        const [node, next] = top;
        if (next === leaving[node].length) {
          state[node] = 2;
          stack.pop();
          continue;
        }
        top[1] += 1;
        const edge = leaving[node][next];
        const { to } = edges[edge];
        if (state[to] === 1) back[edge] = true;
        else if (!state[to]) {
          state[to] = 1;
          stack.push([to, 0]);
        }
      }
    };
    for (let node = 0; node < count; node += 1) if (!entered[node]) walk(node);
    for (let node = 0; node < count; node += 1) walk(node);
    return back;
  }

  // The row of each node: one below the lowest that feeds it. Sources stand above what they feed.
  function longestWays(count, edges, back) {
    const leaving = Array.from({ length: count }, () => []);
    const open = new Array(count).fill(0);
    edges.forEach(({ from, to }, index) => {
      if (from === to) return;
      const [upper, lower] = back[index] ? [to, from] : [from, to];
      leaving[upper].push(lower);
      open[lower] += 1;
    });
    const isSource = open.map((number) => number === 0);
    const row = new Array(count).fill(0);
    const ready = [];
    for (let node = 0; node < count; node += 1) if (!open[node]) ready.push(node);
    for (let next = 0; next < ready.length; next += 1) {
      const node = ready[next];
      for (const lower of leaving[node]) {
        row[lower] = Math.max(row[lower], row[node] + 1);
        open[lower] -= 1;
        if (!open[lower]) ready.push(lower);
      }
    }
    for (let node = 0; node < count; node += 1) {
      if (isSource[node] && leaving[node].length) row[node] = Math.min(...leaving[node].map((lower) => row[lower])) - 1;
    }
    return row;
  }

  // Adds a vertex in every row that an edge passes. Edges of a style from one node share them.
  function led(widths, edges, back, rowOf) {
    const graph = { width: [...widths], row: [...rowOf], rows: [], up: [], down: [], x: [], routes: [], pull: [] };
    const add = (row, width) => {
      graph.width.push(width);
      graph.row.push(row);
      return graph.row.length - 1;
    };
    const lanes = new Map(); // upper node and style: the vertices below it, row by row
    const joined = new Map(); // pairs of vertices: the strength of their tie
    edges.forEach(({ from, to, style }, index) => {
      if (from === to) {
        graph.routes.push([from, to]);
        return;
      }
      const [upper, lower] = back[index] ? [to, from] : [from, to];
      const key = `${upper} ${style}${back[index] ? " back" : ""}`;
      if (!lanes.has(key)) lanes.set(key, []);
      const lane = lanes.get(key);
      const route = [upper];
      for (let row = rowOf[upper] + 1; row < rowOf[lower]; row += 1) {
        const step = row - rowOf[upper] - 1;
        if (step === lane.length) lane.push(add(row, LANE));
        route.push(lane[step]);
      }
      route.push(lower);
      graph.routes.push(route);
      for (let i = 1; i < route.length; i += 1) {
        const isThrough = route[i - 1] >= widths.length && route[i] >= widths.length;
        const pull = style.includes("way") ? PULL.way : isThrough ? PULL.through : PULL.plain;
        const pair = `${route[i - 1]} ${route[i]}`;
        joined.set(pair, { upper: route[i - 1], lower: route[i], pull: Math.max(pull, joined.get(pair)?.pull ?? 0) });
      }
    });
    const count = graph.row.length;
    graph.up = Array.from({ length: count }, () => []);
    graph.down = Array.from({ length: count }, () => []);
    for (const { upper, lower, pull } of joined.values()) {
      graph.down[upper].push({ vertex: lower, pull });
      graph.up[lower].push({ vertex: upper, pull });
    }
    for (let vertex = 0; vertex < count; vertex += 1) (graph.rows[graph.row[vertex]] ??= []).push(vertex);
    graph.rows = Array.from(graph.rows, (row) => row ?? []);
    return graph;
  }

  // Orders each row by the mean places of the neighbours; keeps the order with fewest crossings.
  function sort(graph) {
    const place = new Array(graph.row.length).fill(0);
    const settle = () => graph.rows.forEach((row) => row.forEach((vertex, index) => (place[vertex] = index)));
    settle();
    let best = graph.rows.map((row) => [...row]);
    let fewest = crossings(graph, place);
    for (let sorting = 0; sorting < SORTINGS && fewest > 0; sorting += 1) {
      const isDownward = sorting % 2 === 0;
      const order = isDownward ? graph.rows : graph.rows.toReversed();
      for (const row of order) {
        const wished = new Map();
        for (const vertex of row) {
          const near = isDownward ? graph.up[vertex] : graph.down[vertex];
          const sum = near.reduce((total, { vertex: other }) => total + place[other], 0);
          wished.set(vertex, near.length ? sum / near.length : place[vertex]);
        }
        row.sort((a, b) => wished.get(a) - wished.get(b));
        row.forEach((vertex, index) => (place[vertex] = index));
      }
      const number = crossings(graph, place);
      if (number >= fewest) continue;
      fewest = number;
      best = graph.rows.map((row) => [...row]);
    }
    graph.rows = best;
  }

  function crossings(graph, place) {
    let number = 0;
    for (const row of graph.rows) {
      const lower = [];
      for (const vertex of row) {
        const ends = graph.down[vertex].map(({ vertex: other }) => place[other]);
        for (const end of ends) for (const other of lower) if (other > end) number += 1;
        lower.push(...ends);
      }
    }
    return number;
  }

  function place(graph) {
    graph.x = new Array(graph.row.length).fill(0);
    for (const row of graph.rows) put(graph, row, row.map(() => ({ wish: 0, pull: 1 })));
    for (let placing = 0; placing < PLACINGS; placing += 1) {
      const isDownward = placing % 2 === 0;
      const isLast = placing >= PLACINGS - 4;
      for (const row of isDownward ? graph.rows : graph.rows.toReversed()) {
        const wishes = row.map((vertex) => {
          const near = isLast ? [...graph.up[vertex], ...graph.down[vertex]] : isDownward ? graph.up[vertex] : graph.down[vertex];
          const pull = near.reduce((sum, tie) => sum + tie.pull, 0);
          if (!pull) return { wish: graph.x[vertex], pull: 0.1 };
          return { wish: near.reduce((sum, tie) => sum + tie.pull * graph.x[tie.vertex], 0) / pull, pull };
        });
        put(graph, row, wishes);
      }
    }
  }

  // Places a row as near to its wishes as its order and widths allow (pool adjacent violators).
  function put(graph, row, wishes) {
    const offsets = [];
    let offset = 0;
    row.forEach((vertex, index) => {
      if (index) offset += (graph.width[row[index - 1]] + graph.width[vertex]) / 2 + BETWEEN;
      offsets.push(offset);
    });
    const blocks = [];
    wishes.forEach(({ wish, pull }, index) => {
      let block = { sum: (wish - offsets[index]) * pull, pull, size: 1 };
      while (blocks.length && blocks.at(-1).sum / blocks.at(-1).pull >= block.sum / block.pull) {
        const before = blocks.pop();
        block = { sum: before.sum + block.sum, pull: before.pull + block.pull, size: before.size + block.size };
      }
      blocks.push(block);
    });
    let index = 0;
    for (const { sum, pull, size } of blocks) {
      for (let i = 0; i < size; i += 1, index += 1) graph.x[row[index]] = sum / pull + offsets[index];
    }
  }
})();
