"use strict";
// Panel 2: shows where the nonzeros of each weight lie.

const Sparsity = (() => {
  const names = Object.keys(DATA.patterns);
  let selected = names[0] || null, query = "";

  // The captions of the small pictures leave out the prefix that all names share.
  const steps = names.map((name) => name.split(".").slice(0, -1));
  const same = names.length > 1 ? steps[0].findIndex((step, at) => steps.some((other) => other[at] !== step)) : 0;
  const short = (name) => name.split(".").slice(Math.max(0, same)).join(".").replace(/\.weight$/, "");

  // Returns a canvas with the density of each cell. Empty cells have the colour of the background.
  function picture(pattern, size) {
    const { height, width, levels } = pattern.picture;
    const bytes = Uint8Array.from(atob(levels), (char) => char.charCodeAt(0));
    const canvas = el("canvas", { width, height, role: "img", "aria-label": `Density of ${shape(pattern.shape)} elements in ${height} by ${width} cells` });
    canvas.style.aspectRatio = `${Math.max(pattern.shape[1], pattern.shape[0] / 4)} / ${Math.max(pattern.shape[0], pattern.shape[1] / 4)}`;
    if (size) canvas.style.maxWidth = size;
    const [r, g, b] = getComputedStyle(document.documentElement).getPropertyValue("--ink-picture").split(",").map(Number);
    const image = new ImageData(width, height), most = bytes.reduce((a, c) => Math.max(a, c), 0) || 1;
    bytes.forEach((level, at) => image.data.set([r, g, b, level ? 40 + (215 * level) / most : 0], 4 * at));
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  function histogram(title, counts, unit) {
    const width = 320, height = 90, most = Math.max(...counts.bins), step = width / counts.bins.length;
    const bars = counts.bins.map((count, at) => svg("rect", { x: at * step + 0.5, width: Math.max(1, step - 1), class: "histogram-bar",
      y: height - (height * count) / most, height: (height * count) / most },
      svg("title", {}, `${plural(count, unit)} with ${counts.low + at * counts.width}${counts.width > 1 ? ` to ${counts.low + (at + 1) * counts.width - 1}` : ""} nonzeros`)));
    return el("figure", {}, el("figcaption", {}, title),
      svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "histogram", role: "img", preserveAspectRatio: "none",
        "aria-label": `${title}: from ${counts.low} to ${counts.high}, mean ${number(counts.mean)}` }, bars),
      el("div", { class: "axis" }, el("span", {}, number(counts.low)), el("span", { class: "muted" }, `mean ${number(counts.mean)}`), el("span", {}, number(counts.high))));
  }

  function fill(pattern) {
    if (!pattern.fill) return null;
    const density = pattern.nonzeros / (pattern.shape[0] * pattern.shape[1]);
    const strength = (share) => Math.max(0, (share - density) / (1 - density || 1));
    return el("figure", {}, el("figcaption", {}, "Fill of blocks: the share of nonzeros in blocks that have any"),
      el("div", { class: "scroll" }, el("table", { class: "heat" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "rows \\ columns"), DATA.blocks.map((size) => el("th", { scope: "col" }, String(size))))),
        el("tbody", {}, pattern.fill.map((row, at) => el("tr", {}, el("th", { scope: "row" }, String(DATA.blocks[at])),
          row.map((share) => el("td", { class: strength(share) > 0.65 ? "strong" : null, style: `--share:${strength(share).toFixed(3)}` }, percent(share)))))))));
  }

  function groups(pattern) {
    if (!pattern.groups.length) return null;
    const verdicts = { found: "found", nearly: "nearly found", "by chance": "holds, but by chance", "": "no" };
    return el("figure", {}, el("figcaption", {}, "N:M: groups of M neighbours in a row with at most N nonzeros"),
      el("table", { class: "grid compact" },
        el("thead", {}, el("tr", {}, ["N:M", "Groups", "By chance", ""].map((name, at) => el("th", { scope: "col", class: at && at < 3 ? "figures" : null }, name)))),
        el("tbody", {}, pattern.groups.map((each) => el("tr", { class: each.verdict === "found" || each.verdict === "nearly" ? "selected" : null },
          el("td", {}, `${each.n}:${each.m}`), el("td", { class: "figures" }, share(each.held)),
          el("td", { class: "figures muted" }, share(each.chance)), el("td", {}, verdicts[each.verdict]))))));
  }

  const share = (value) => (value === 1 ? "all" : percent(Math.min(value, 0.9999), value > 0.99 ? 2 : 1));

  function levels(decision) {
    const arrays = decision?.details?.arrays || [], total = arrays.reduce((sum, [, size]) => sum + size, 0);
    if (!total) return null;
    return el("figure", {}, el("figcaption", {}, `Bytes of each array, packed as ${decision.format}`),
      arrays.map(([name, size]) => bar(name, size / total, `${bytes(size)}, ${percent(size / total)}`, "fill-chosen")),
      el("p", { class: "muted" }, `${bytes(total)} together; dense ${bytes(decision.dense_bytes)}.`));
  }

  function balance(pattern) {
    const { threads, rows, nonzeros } = pattern.shares;
    if (threads < 2) return el("figure", {}, el("figcaption", {}, "Balance over threads"), el("p", { class: "muted" }, "The report was made with one thread."));
    const uneven = (list) => Math.max(...list) / (list.reduce((a, b) => a + b, 0) / list.length || 1);
    const shown = (title, list) => [el("p", {}, `${title}: the fullest thread has ${number(uneven(list))} times the mean`),
      list.slice(0, 16).map((count, at) => bar(`thread ${at}`, count / Math.max(...rows, ...nonzeros), plural(count, "nonzero"), "fill-other"))];
    return el("figure", {}, el("figcaption", {}, "Balance over threads"), shown("Equally many rows", rows), shown("Cut by nonzeros", nonzeros),
      el("p", { class: "muted" }, "The shares of rows if threads share them out. Kernels for many tokens share out tiles of tokens first."));
  }

  const decisionOf = (name) => DATA.decisions.find((each) => each.name === name && each.sparse) || DATA.decisions.find((each) => each.name === name);

  function draw() {
    const shown = names.filter((name) => !query || name.toLowerCase().includes(query));
    byId("thumbnails").replaceChildren(...shown.map((name) => {
      const pattern = DATA.patterns[name], decision = decisionOf(name);
      return el("div", { class: "thumbnail", role: "option", tabindex: name === selected ? 0 : -1, "aria-selected": String(name === selected), "data-name": name,
        title: name, onclick: () => { selected = name; draw(); }, onkeydown: key },
        el("div", { class: "frame" }, picture(pattern)),
        el("div", { class: "caption" }, el("span", { class: "short" }, short(name).split(/(?<=\.)/).flatMap((step) => [step, el("wbr")])),
          el("span", { class: "muted" }, `${zerosText(1 - pattern.nonzeros / (pattern.shape[0] * pattern.shape[1]))} zeros, ${decision?.sparse ? "sparse" : "dense"}`)));
    }));
    const pattern = DATA.patterns[selected];
    if (!pattern) {
      byId("pattern").replaceChildren(el("p", { class: "empty" }, query && names.length ? `No pattern matches “${query}”.`
        : "There is no pattern to show. Weights without a decision of their own, and weights that the program computes, have no picture."));
      return;
    }
    const decision = decisionOf(selected);
    put(byId("pattern"),
      el("h2", { class: "code-text" }, selected),
      el("p", { class: "muted" }, `${shape(pattern.shape)}, ${plural(pattern.nonzeros, "nonzero")}${decision?.pattern ? `, ${decision.pattern}` : ""}. ` +
        cellText(pattern)),
      el("div", { class: "figures-grid" },
        el("figure", { class: "large" }, el("figcaption", {}, "Density"), picture(pattern)),
        el("div", { class: "stack" }, histogram("Nonzeros in a row", pattern.rows, "row"), histogram("Nonzeros in a column", pattern.columns, "column")),
        fill(pattern), groups(pattern), levels(decision), balance(pattern)));
  }

  function cellText({ shape: [rows, columns], picture: { height, width } }) {
    const cell = [Math.ceil(rows / height), Math.ceil(columns / width)];
    return cell.every((size) => size === 1) ? "A cell of the picture is one element; those that are not zero have a colour."
      : `A cell of the picture stands for about ${shape(cell)} elements; cells of a stronger colour have more nonzeros.`;
  }

  function key(event) {
    const list = [...byId("thumbnails").children], at = list.indexOf(event.currentTarget);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: list.length - 1, Enter: at, " ": at }[event.key];
    if (to === undefined || !list[to]) return;
    event.preventDefault();
    selected = list[to].dataset.name;
    draw();
    byId("thumbnails").querySelector('[aria-selected="true"]')?.focus();
  }

  on("weight", (decision) => { if (DATA.patterns[decision.name]) { selected = decision.name; draw(); } });
  on("theme", draw);
  return {
    start: draw,
    search(text, next) {
      query = text.trim().toLowerCase();
      const found = names.filter((name) => name.toLowerCase().includes(query));
      if (found.length && (next || !found.includes(selected))) selected = found[(found.indexOf(selected) + (next ? 1 : 0) + found.length) % found.length] || found[0];
      draw();
      return found.length;
    },
    focus: () => byId("thumbnails").querySelector('[aria-selected="true"]')?.focus(),
  };
})();
