"use strict";
// Shows the text of a stage. Only the lines in view are elements of the page, so that a million lines scroll as fast as ten.

hljs.registerLanguage("mlir", () => ({
  name: "MLIR",
  keywords: { keyword: "module attributes func.func return private loc memref tensor vector dense true false index f16 bf16 f32 f64 i1 i8 i16 i32 i64 strided" },
  contains: [
    { className: "comment", begin: /\/\/.*/ }, { className: "string", begin: /"/, end: /"/ },
    { className: "variable", begin: /%[\w$.#-]+/ }, { className: "title", begin: /@[\w$.-]+/ }, { className: "meta", begin: /[#!][\w$.-]+/ },
    { className: "symbol", begin: /\^\w+/ }, { className: "built_in", begin: /\b[a-z_]+\.[\w.]+/ }, { className: "number", begin: /-?\b\d[\w.+-]*/ },
  ],
}));

hljs.registerLanguage("att", () => ({
  name: "AT&T assembly",
  contains: [
    { className: "comment", begin: /#.*/ }, { className: "comment", begin: /\/\/.*/ }, { className: "string", begin: /"/, end: /"/ },
    { className: "symbol", begin: /^[.\w$]+:/ }, { className: "meta", begin: /^\s+\.\w+/ }, { className: "variable", begin: /%\w+/ },
    { className: "keyword", begin: /^\s+[a-z][\w.]*/ }, { className: "number", begin: /\$?-?\b(0x)?\d[\da-f]*/ },
  ],
}));

const LANGUAGES = { py: "python", mlir: "mlir", ll: "llvm", s: "att" };
const LINE = 18; // pixels; page.css has the same
const TALLEST = 8000000; // pixels that browsers can scroll

class Listing {
  constructor(label, act) {
    this.act = act;
    this.lines = [], this.rows = [], this.related = new Set(), this.hot = [], this.selected = null, this.cache = new Map();
    this.body = el("div", { class: "lines" });
    this.space = el("div", { class: "space" }, this.body);
    this.marks = el("div", { class: "marks", "aria-hidden": "true" });
    this.view = el("div", { class: "view", tabindex: 0, role: "listbox", "aria-label": label, onscroll: () => this.moved(), onkeydown: (event) => this.key(event),
      onclick: (event) => this.click(event) }, this.space);
    this.element = el("div", { class: "listing" }, this.view, this.marks);
    new ResizeObserver(() => this.moved()).observe(this.view);
  }

  // Shows a text. By default a row is a line. For differences, rows are {line, mark}, {fold: [lines]} or {}.
  show(text, kind, rows = null) {
    this.lines = text.split("\n");
    if (this.lines.at(-1) === "") this.lines.pop();
    this.kind = kind;
    this.cache.clear();
    this.setRows(rows);
    this.view.scrollTop = this.view.scrollLeft = 0;
  }

  setRows(rows) {
    this.rows = rows || this.lines.map((_, line) => ({ line }));
    this.at = new Map(this.rows.map((row, at) => [row.line, at]));
    this.space.style.height = `${Math.min(TALLEST, this.rows.length * LINE)}px`;
    const longest = this.lines.reduce((most, line) => Math.max(most, line.length + 7 * (line.split("\t").length - 1)), 0);
    this.space.style.minWidth = `calc(${Math.min(longest, 4000) + 9} * 1ch)`;
    this.draw();
    this.mark();
  }

  // Returns the first of the rows to draw, and the one behind the last.
  visible() {
    const height = this.view.clientHeight || 400, first = Math.max(0, Math.floor(this.view.scrollTop / LINE) - 10);
    return [first, Math.min(this.rows.length, first + Math.ceil(height / LINE) + 20)];
  }

  // Draws what a scroll brings into view. Drawing the same rows anew would lose a click between press and release.
  moved() {
    if (String(this.visible()) !== String(this.drawn)) this.draw();
  }

  draw() {
    const [first, last] = (this.drawn = this.visible());
    this.body.style.transform = `translateY(${first * LINE}px)`;
    this.body.replaceChildren(...this.rows.slice(first, last).map((row, at) => this.row(row, first + at)));
  }

  row(row, at) {
    if (row.fold) return el("div", { class: "line fold-line", "data-row": at }, el("span", { class: "text" }, `⋯ ${plural(row.fold.length, "equal line")}`));
    if (row.line === undefined) return el("div", { class: "line filler" });
    const classes = ["line", row.mark, this.related.has(row.line) ? "related" : "", row.line === this.selected ? "current" : "",
      this.hot.some(([first, last]) => row.line >= first && row.line <= last) ? "hot" : ""];
    const text = el("span", { class: "text" });
    text.innerHTML = this.highlighted(row.line);
    return el("div", { class: classes.filter(Boolean).join(" "), role: "option", "aria-selected": String(row.line === this.selected), "data-row": at, "data-line": row.line },
      el("span", { class: "line-number", "aria-hidden": "true" }, String(row.line + 1)), text);
  }

  highlighted(line) {
    if (!this.cache.has(line)) this.cache.set(line, hljs.highlight(this.lines[line], { language: LANGUAGES[this.kind], ignoreIllegals: true }).value);
    return this.cache.get(line);
  }

  // Draws ticks beside the text, at related lines and hot loops.
  mark() {
    const total = this.rows.length || 1, ticks = new Map();
    for (const [first, last] of this.hot) {
      const at = this.at.get(first);
      if (at !== undefined) ticks.set(`hot${first}`, el("i", { class: "tick hot", style: `top:${(100 * at) / total}%;height:max(3px,${(100 * (last - first)) / total}%)` }));
    }
    for (const line of this.related) {
      const at = this.at.get(line);
      if (at !== undefined) ticks.set(Math.floor((300 * at) / total), el("i", { class: "tick", style: `top:${(100 * at) / total}%` }));
    }
    this.marks.replaceChildren(...ticks.values());
  }

  relate(lines, selected = null, scroll = true) {
    this.related = lines;
    this.selected = selected;
    if (scroll && selected === null && lines.size) this.reach(this.foremost(lines));
    this.draw();
    this.mark();
  }

  // Returns the first of these lines that is in a hot loop, or else the first line.
  foremost(lines) {
    const sorted = [...lines].sort((a, b) => a - b);
    return sorted.find((line) => this.hot.some(([first, last]) => line >= first && line <= last)) ?? sorted[0];
  }

  reach(line) {
    const at = this.at.get(line);
    if (at === undefined) return;
    const y = at * LINE, height = this.view.clientHeight;
    if (y < this.view.scrollTop + LINE || y > this.view.scrollTop + height - 3 * LINE) this.view.scrollTop = Math.max(0, y - height / 3);
    this.draw();
  }

  click(event) {
    const target = event.target.closest("[data-row]");
    if (!target || String(window.getSelection())) return;
    const row = this.rows[Number(target.dataset.row)];
    if (row.fold) this.setRows(this.rows.flatMap((each) => (each === row ? row.fold.map((line) => ({ line })) : [each])));
    else this.act(this, row.line);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (step) {
      let at = this.selected === null ? Math.floor(this.view.scrollTop / LINE) - (step > 0 ? 1 : 0) : this.at.get(this.selected) ?? 0;
      do at += Math.sign(step); while (this.rows[at] && this.rows[at].line === undefined);
      at = Math.max(0, Math.min(this.rows.length - 1, at + step - Math.sign(step)));
      if (this.rows[at]?.line !== undefined) { this.act(this, this.rows[at].line); this.reach(this.rows[at].line); }
      event.preventDefault();
    } else if (event.key === "Enter" && this.selected !== null) this.act(this, this.selected, true);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") { emit("other-listing", this, event.key); }
  }

  // Returns the next line after `from` that contains the query, or null.
  find(query, from) {
    const count = this.lines.length;
    for (let step = 1; step <= count; step++) {
      const line = (from + step + count) % count;
      if (this.lines[line].toLowerCase().includes(query)) return line;
    }
    return null;
  }
}
