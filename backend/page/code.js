"use strict";
// Panel 3: shows two stages of a kernel side by side. A line knows the lines of other stages that it comes from.

const Code = (() => {
  const kernels = DATA.kernelList;
  const texts = new Map(); // number of the code → {text, origins}
  const sides = [{}, {}];
  let kernel = null, decision = null, differences = false, place = null, syncing = false;

  async function unpacked(stage) {
    if (!stage || stage.code === null) return null;
    if (!texts.has(stage.code)) {
      const packed = Uint8Array.from(atob(byId(`code-${stage.code}`).textContent), (char) => char.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
      const { text, origins } = JSON.parse(await new Response(stream).text());
      texts.set(stage.code, { text, origins: origins.flatMap(([count, lines]) => Array(count).fill(lines)) });
    }
    return texts.get(stage.code);
  }

  // Lines count from 0 here, and from 1 in the data. Lines of the contract IR link all stages: "common" lines.
  const stageNamed = (name) => kernel.stages.find((each) => each.stage === name);

  async function commonLines(stage, line) {
    if (stage.stage === "contract") return new Set([line]);
    if (stage.stage === "fx") {
      const contract = await unpacked(stageNamed("contract"));
      return new Set((contract?.origins || []).map((lines, at) => (lines.includes(line + 1) ? at : -1)).filter((at) => at >= 0));
    }
    const code = await unpacked(stage);
    return new Set((code?.origins[line] || []).map((each) => each - 1));
  }

  async function linesOf(stage, common) {
    if (stage.stage === "contract") return common;
    if (stage.stage === "fx") {
      const contract = await unpacked(stageNamed("contract"));
      return new Set([...common].flatMap((each) => contract?.origins[each] || []).map((each) => each - 1));
    }
    const code = await unpacked(stage);
    return new Set((code?.origins || []).map((lines, at) => (lines.some((each) => common.has(each - 1)) ? at : -1)).filter((at) => at >= 0));
  }

  async function follow(listing, line) {
    const side = sides.find((each) => each.listing === listing), other = sides.find((each) => each !== side);
    const common = await commonLines(side.stage, line);
    place = { common };
    side.listing.relate(await linesOf(side.stage, common), line);
    const there = await linesOf(other.stage, common);
    other.listing.relate(there);
    byId("code-note").textContent = common.size
      ? `Line ${line + 1} of ${side.stage.stage} belongs to ${plural(there.size, "line")} of ${other.stage.stage}.`
      : side.stage.stage === "fx" ? `Line ${line + 1} of fx becomes no code of its own.`
        : `Line ${line + 1} of ${side.stage.stage} comes from no line of the program: the compiler added it, or a pass did not keep its origin.`;
  }

  function forget() {
    place = null;
    for (const side of sides) side.listing.relate(new Set());
    byId("code-note").textContent = hint();
  }

  const hint = () => (kernel?.graph ? `The graph before and after each graph pass. ${kernels.every((each) => each.graph)
    ? "No kernel was compiled with it: kernels of sparse tensors and of edge lists are compiled when the model is called." : "Kernels are in the list of kernels."}`
    : "Select a line to see where it comes from, and what it becomes.");

  const quoted = (text) => (/^[\w./=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

  function command(stage) {
    const path = (file) => quoted(DATA.folder ? `${DATA.folder}/${file}` : file);
    if (stage.pass && stage.before) return `gossamer-opt ${path(stage.before)} -p ${quoted(stage.pass)}`;
    if (stage.stage === "contract") return `python -m gossamer.run ${path(stage.file)}`;
    return null;
  }

  function option(stage, at) {
    const size = stage.code === null ? "left out of this page" : stage.same ? "unchanged" : plural(stage.lines, "line");
    return el("option", { value: at }, `${String(at + 1).padStart(2, "0")} ${stage.stage} · ${size}`);
  }

  async function show(number, at) {
    const side = sides[number];
    side.stage = kernel.stages[at];
    side.select.value = String(at);
    const code = await unpacked(side.stage);
    side.listing.hot = side.stage.loops.slice(0, 12).map((loop) => [loop.first - 1, loop.last - 1]);
    side.listing.show(code ? code.text : `This stage is not in the page, to keep it small. See ${side.stage.file}.`, code ? side.stage.kind : "py");
    const line = command(side.stage);
    side.head.replaceChildren(el("span", { class: "code-text path tail", title: side.stage.file }, el("bdi", {}, side.stage.file)), line
      ? el("button", { title: line, "data-command": line, onclick: (event) => copied(event.target, line) }, "Copy as a command") : el("span"));
  }

  // Sets the rows of both listings, with equal lines side by side. Long runs of equal lines are folded.
  function compare() {
    const [left, right] = sides.map((each) => each.listing);
    if (!differences) { for (const side of [left, right]) side.setRows(null); return; }
    const changes = Diff.diffArrays(left.lines, right.lines, { timeout: 3000 });
    if (!changes) {
      byId("code-note").textContent = "These stages differ too much to compare line by line. Choose two that follow each other.";
      for (const side of [left, right]) side.setRows(null);
      return;
    }
    const rows = [[], []];
    let a = 0, b = 0, removed = 0;
    const level = () => { while (rows[0].length < rows[1].length) rows[0].push({}); while (rows[1].length < rows[0].length) rows[1].push({}); };
    for (const { value, added, removed: gone } of changes) {
      if (gone) { for (const _ of value) rows[0].push({ line: a++, mark: "removed" }); removed += value.length; }
      else if (added) for (const _ of value) rows[1].push({ line: b++, mark: "added" });
      else {
        level();
        const keep = value.length > 12 ? 4 : value.length;
        value.forEach((_, at) => {
          if (at < keep || at >= value.length - keep) { rows[0].push({ line: a + at }); rows[1].push({ line: b + at }); }
          else if (at === keep) {
            const hidden = Array.from({ length: value.length - 2 * keep }, (_, more) => more + at);
            rows[0].push({ fold: hidden.map((each) => a + each) });
            rows[1].push({ fold: hidden.map((each) => b + each) });
          }
        });
        a += value.length;
        b += value.length;
      }
    }
    level();
    left.setRows(rows[0]);
    right.setRows(rows[1]);
    const added = changes.filter((each) => each.added).reduce((sum, each) => sum + each.value.length, 0);
    byId("code-note").textContent = added || removed ? `${plural(removed, "line")} on the left went, ${plural(added, "line")} on the right came.` : "The two stages are equal.";
  }

  async function facts() {
    const last = kernel.stages.findLast((each) => each.loops.length);
    const members = DATA.decisions.filter((each) => each.details?.stages === kernel.name);
    const about = members.includes(decision) ? decision : members[0];
    put(byId("kernel-facts"),
      Kernel.loops(last, async (loop) => { await show(1, kernel.stages.indexOf(last)); sides[1].listing.relate(new Set(), loop.first - 1, false); sides[1].listing.reach(loop.first - 1); }),
      about ? el("div", { class: "figures-grid" }, Kernel.cost(about), Kernel.roofline(about)) : null,
      members.length > 1 ? el("p", {}, el("label", {}, "The figures are about ", el("select", { onchange: (event) => { decision = members[event.target.value]; facts(); } },
        members.map((each, at) => el("option", { value: at, selected: each === about }, each.name))))) : null);
  }

  async function open(chosen) {
    kernel = chosen;
    byId("kernel-select").value = String(kernels.indexOf(kernel));
    for (const side of sides) side.select.replaceChildren(...kernel.stages.map(option));
    const fx = kernel.stages.findIndex((each) => each.stage === "fx");
    await show(0, Math.max(0, fx));
    await show(1, kernel.stages.length - 1);
    forget();
    if (differences) compare();
    await facts();
  }

  async function change(number, at) {
    await show(number, at);
    if (differences) compare();
    else if (place) for (const side of sides) side.listing.relate(await linesOf(side.stage, place.common));
  }

  function start() {
    if (!kernels.length) {
      byId("code").replaceChildren(el("div", { class: "empty" },
        el("p", {}, "This report has no code. Kernels write their stages if you name a folder:"),
        el("pre", {}, 'report = gossamer.explain(model, *inputs, options={"dump_ir": "ir"})\nreport.save("report.html")')));
      return;
    }
    for (const [number, name] of [[0, "Left"], [1, "Right"]]) {
      const side = sides[number];
      side.select = el("select", { "aria-label": `${name} stage`, onchange: (event) => change(number, Number(event.target.value)) });
      side.listing = new Listing(`${name} listing`, follow);
      side.head = el("div", { class: "listing-head" });
      side.element = el("div", { class: "side" }, side.select, side.head, side.listing.element);
      side.listing.view.addEventListener("scroll", () => {
        if (!differences || syncing) return;
        syncing = true;
        const other = sides[1 - number].listing.view;
        other.scrollTop = side.listing.view.scrollTop;
        requestAnimationFrame(() => (syncing = false));
      });
    }
    byId("listings").replaceChildren(...sides.map((each) => each.element));
    byId("code-bar").replaceChildren(
      el("label", {}, "Kernel ", el("select", { id: "kernel-select", onchange: (event) => open(kernels[event.target.value]) },
        kernels.map((each, at) => el("option", { value: at }, each.graph ? `graph passes (${at + 1})` : each.name)))),
      el("label", { class: "check" }, el("input", { type: "checkbox", id: "differences", onchange: (event) => { differences = event.target.checked; compare(); if (!differences) forget(); } }), " Differences"),
      el("button", { onclick: () => step(-1) }, "‹ Step"), el("button", { onclick: () => step(1) }, "Step ›"));
    open(kernels.find((each) => !each.graph) || kernels[0]);
  }

  // Shows two consecutive stages among those that changed something. The right listing moves forward; or back, if the left one
  // already shows the stage before it.
  async function step(direction) {
    const changed = kernel.stages.map((stage, at) => [stage, at]).filter(([stage]) => !stage.same && stage.code !== null).map(([, at]) => at);
    const [left, right] = sides.map((each) => kernel.stages.indexOf(each.stage));
    let at = changed.findLastIndex((each) => each <= right);
    if (direction > 0) at = at + 1 < changed.length ? at + 1 : 1;
    else if (changed[at - 1] === left) at -= 1;
    if (at < 1 || at >= changed.length) return;
    await show(0, changed[at - 1]);
    await show(1, changed[at]);
    if (!byId("differences").checked) { byId("differences").checked = differences = true; }
    compare();
  }

  on("weight", (chosen) => { if (kernel && hasKernel(chosen)) decision = chosen; });
  on("kernel", (chosen) => {
    decision = chosen;
    const found = kernels.findLast((each) => each.name === chosen.details.stages);
    if (found) open(found);
  });
  on("other-listing", (_, pressed) => sides[pressed === "ArrowRight" ? 1 : 0].listing.view.focus());

  const hasKernel = (chosen) => Boolean(chosen.details?.stages) && kernels.some((each) => each.name === chosen.details.stages);

  return {
    start, hasKernel, forget: () => kernel && forget(),
    search(text, next) {
      const query = text.trim().toLowerCase();
      if (!kernel || !query) { if (kernel) forget(); return 0; }
      for (const side of [sides[0], sides[1]]) {
        const line = side.listing.find(query, next && side.listing.selected !== null ? side.listing.selected : -1);
        if (line !== null) { follow(side.listing, line).then(() => side.listing.reach(line)); return 1; }
      }
      return 0;
    },
    focus: () => sides[0].listing?.view.focus(),
  };
})();
