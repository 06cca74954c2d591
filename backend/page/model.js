"use strict";
// Panel 1: shows the modules of the model as a tree, each weight with its decision, and advice.

const Model = (() => {
  const decisions = DATA.decisions;
  const root = { name: "", path: "", children: new Map(), decisions: [], open: true, level: 0 };
  let rows = [], selected = null, query = "", focused = 0;

  const mean = (list) => list.length ? Math.exp(list.reduce((sum, gain) => sum + Math.log(gain), 0) / list.length) : null;
  const sparse = (node) => node.all.filter((each) => each.sparse);

  function build() {
    for (const decision of decisions) {
      let node = root;
      const parts = decision.name.split(".");
      for (const [at, part] of parts.entries()) {
        const path = parts.slice(0, at + 1).join(".");
        if (!node.children.has(part)) node.children.set(part, { name: part, path, children: new Map(), decisions: [], level: node.level + 1 });
        node = node.children.get(part);
      }
      node.decisions.push(decision);
    }
    const gather = (node) => {
      merge(node);
      node.all = [...node.decisions, ...[...node.children.values()].flatMap(gather)];
      return node.all;
    };
    gather(root);
    const open = (node, budget, outermost = true) => {  // a module that contains all weights, such as "bert", is open
      node.open = outermost || node.all.length <= budget;
      for (const child of node.children.values()) open(child, budget, outermost && node.children.size === 1);
    };
    open(root, decisions.length <= 24 ? Infinity : 6);
  }

  // Merges a module with its only child into one row: "self.query.weight".
  function merge(node) {
    for (const [key, child] of [...node.children]) {
      let only = child;
      while (only.children.size === 1 && !only.decisions.length) {
        const [next] = only.children.values();
        next.name = `${only.name}.${next.name}`;
        only = next;
      }
      only.level = node.level + 1;
      node.children.set(key, only);
      const level = (each) => { for (const below of each.children.values()) { below.level = each.level + 1; level(below); } };
      level(only);
    }
  }

  const matches = (node) => !query || node.all.some((each) =>
    `${each.name} ${each.op} ${each.reason} ${each.schedule || ""} ${each.pattern}`.toLowerCase().includes(query));

  function visible(node, found = []) {
    for (const child of node.children.values()) {
      if (!matches(child)) continue;
      found.push({ node: child });
      if (child.open || query) {
        for (const decision of child.decisions) if (child.children.size || child.decisions.length > 1) found.push({ node: child, decision });
        visible(child, found);
      }
    }
    return found;
  }

  const foldable = (row) => !row.decision && (row.node.children.size > 0 || row.node.decisions.length > 1);
  const only = (row) => row.decision || (row.node.decisions.length === 1 && !row.node.children.size ? row.node.decisions[0] : null);

  function verdict(decision) {
    return decision.sparse
      ? el("span", {}, el("b", { class: "sparse" }, "sparse"), ` ${decision.schedule || decision.format}, ${short(decision.reason)}`)
      : el("span", {}, el("b", { class: "dense" }, "dense"), ` ${short(decision.reason)}`);
  }

  const short = (reason) => reason.split(/; (?:gain of the whole|(?:alone, )?measured)/)[0];

  function cells(row) {
    const decision = only(row), node = row.node;
    const indent = node.level + (row.decision ? 1 : 0);
    const mark = foldable(row) ? (node.open || query ? "▾" : "▸") : "";
    const name = row.decision ? decision.op : node.name;
    const first = el("td", { role: "gridcell", class: "name", style: `--level:${indent - 1}` },
      el("span", { class: "fold", "aria-hidden": "true" }, mark), el("span", { class: "path", title: node.path }, name));
    if (decision) {
      const zeros = 1 - decision.density;
      return [first,
        el("td", { role: "gridcell", class: "wide" }, decision.op),
        el("td", { role: "gridcell", class: "wide figures" }, shape(decision.shape)),
        el("td", { role: "gridcell", class: "zeros figures" }, el("span", { class: "meter", "aria-hidden": "true" },
          el("span", { style: `width:${zeros * 100}%` })), zerosText(zeros)),
        el("td", { role: "gridcell", class: "figures" }, decision.sparse ? "" : el("b", { class: "dense narrow" }, "dense "), decision.gain === null ? "" :
          el("span", { class: `gain ${gainClass(decision.gain)}`, title: decision.measured ? "measured" : "predicted" }, gainText(decision.gain))),
        el("td", { role: "gridcell", class: "verdict" }, verdict(decision))];
    }
    const taken = sparse(node), gain = mean(taken.map((each) => each.gain).filter((each) => each !== null));
    return [first, el("td", { role: "gridcell", class: "wide" }), el("td", { role: "gridcell", class: "wide" }), el("td", { role: "gridcell", class: "zeros" }),
      el("td", { role: "gridcell", class: "figures" }, gain === null ? "" :
        el("span", { class: `gain ${gainClass(gain)}`, title: "geometric mean of the sparse weights" }, gainText(gain))),
      el("td", { role: "gridcell", class: "verdict muted" }, `${taken.length} of ${node.all.length} sparse`)];
  }

  function draw() {
    rows = visible(root);
    focused = Math.max(0, Math.min(focused, rows.length - 1));
    const body = el("tbody", { role: "rowgroup" }, rows.map((row, at) => {
      const decision = only(row);
      return el("tr", {
        role: "row", "aria-level": row.node.level, tabindex: at === focused ? 0 : -1, "data-at": at,
        "aria-expanded": foldable(row) ? String(Boolean(row.node.open || query)) : null,
        "aria-selected": decision ? String(decision === selected) : null,
        class: decision && decision === selected ? "selected" : null,
        onclick: () => { focused = at; activate(row); },
      }, cells(row));
    }));
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ["Weight", "Use", "Shape", "Zeros", "Gain", "Decision"].map((name, at) =>
      el("th", { role: "columnheader", scope: "col", class: ["", "wide", "wide figures", "zeros figures", "figures", "verdict"][at] }, name))));
    byId("tree").replaceChildren(rows.length
      ? el("table", { role: "treegrid", "aria-label": "Weights by module", class: "grid" }, head, body)
      : el("p", { class: "empty" }, query ? `No weight matches “${query}”.` :
        "torch.compile traced no weight matrix, no mask, no edge list and no SparseTensor. So there was nothing to decide."));
  }

  function focusRow(at) {
    focused = Math.max(0, Math.min(rows.length - 1, at));
    for (const row of byId("tree").querySelectorAll("tr[data-at]")) row.tabIndex = Number(row.dataset.at) === focused ? 0 : -1;
    byId("tree").querySelector(`tr[data-at="${focused}"]`)?.focus();
  }

  function activate(row) {
    const decision = only(row);
    if (decision) emit("weight", decision);
    else row.node.open = !row.node.open;
    draw();
    focusRow(focused);
  }

  function key(event) {
    const row = rows[focused];
    if (!row) return;
    const act = {
      ArrowDown: () => focusRow(focused + 1), ArrowUp: () => focusRow(focused - 1),
      Home: () => focusRow(0), End: () => focusRow(rows.length - 1),
      ArrowRight: () => { if (foldable(row) && !row.node.open) { row.node.open = true; draw(); } focusRow(focused + (row.node.open ? 0 : 1)); },
      ArrowLeft: () => {
        if (foldable(row) && row.node.open) { row.node.open = false; draw(); focusRow(focused); }
        else {
          const above = rows.findLastIndex((each, at) => at < focused && each.node.level < row.node.level + (row.decision ? 1 : 0) && !each.decision);
          if (above >= 0) focusRow(above);
        }
      },
      Enter: () => activate(row), " ": () => activate(row),
    }[event.key];
    if (act) { act(); event.preventDefault(); }
  }

  function summary() {
    const taken = decisions.filter((each) => each.sparse);
    const measured = taken.filter((each) => each.measured).length;
    const cards = [
      card(String(DATA.sparse), DATA.sparse === 1 ? "sparse weight" : "sparse weights"),
      card(String(DATA.dense), "left dense"),
      card(String(DATA.kernels), DATA.kernels === 1 ? "kernel" : "kernels", "Different weights may share a kernel."),
    ];
    if (DATA.packed_bytes) cards.push(card(bytes(DATA.packed_bytes), `packed, of ${bytes(DATA.dense_bytes)}`));
    const gain = mean(taken.map((each) => each.gain).filter((each) => each !== null));
    if (gain !== null) cards.push(card(gainText(gain), `mean gain, ${measured ? `${measured} measured` : "predicted"}`, "Geometric mean over the sparse weights."));
    cards.push(card(String(DATA.breaks.length), DATA.breaks.length === 1 ? "graph break" : "graph breaks"));
    byId("summary").replaceChildren(...cards);
    byId("mode").textContent = DATA.training ? "training" : "inference";
    const machine = DATA.machine;
    byId("footer").textContent = [machine.cpu, plural(machine.threads, "thread"), `vectors of ${machine.bits} bits`,
      `torch ${machine.torch}`, `gossamer ${machine.gossamer}`].join(" · ");
  }

  function advice() {
    if (!DATA.advice.length && !DATA.off.length) return;
    const items = DATA.advice.map((each) => el("li", {}, el("b", {}, `${each.title}. `), withCode(each.text), " ",
      each.weights.length ? el("span", { class: "links" }, each.weights.slice(0, 3).map((name) =>
        el("button", { class: "link", onclick: () => choose(name) }, name)),
        each.weights.length > 3 ? el("span", { class: "muted" }, ` and ${each.weights.length - 3} more`) : null) : null));
    const notes = DATA.off.map((sentence) => el("li", {}, sentence));
    byId("advice").replaceChildren(el("details", { class: "advice", open: items.length <= 6 },
      el("summary", {}, "What to change to win more ", el("span", { class: "count" }, String(items.length + notes.length))),
      el("ul", {}, items, notes)));
  }

  function choose(name) {
    const decision = decisions.find((each) => each.name === name);
    if (!decision) return;
    reveal(decision);
    emit("weight", decision);
  }

  function reveal(decision) {
    const unfold = (node) => {
      const inside = node.all.includes(decision);
      if (inside) { node.open = true; for (const child of node.children.values()) unfold(child); }
    };
    unfold(root);
  }

  on("weight", (decision) => {
    selected = decision;
    reveal(decision);
    draw();
    const at = rows.findIndex((row) => only(row) === decision);
    if (at >= 0) focused = at;
    draw();
    byId("tree").querySelector("tr.selected")?.scrollIntoView({ block: "nearest" });
  });

  return {
    start() {
      build();
      summary();
      advice();
      draw();
      byId("tree").addEventListener("keydown", key);
    },
    search(text, next) {
      query = text.trim().toLowerCase();
      draw();
      Flow.search(query);
      if (next && rows.length) {
        const hits = rows.map((row, at) => [row, at]).filter(([row]) => only(row));
        const after = hits.find(([row, at]) => at > rows.findIndex((each) => only(each) === selected)) || hits[0];
        if (after) emit("weight", only(after[0]));
      }
      return rows.filter(only).length;
    },
    focus: () => focusRow(focused),
  };
})();
