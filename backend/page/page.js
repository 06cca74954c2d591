"use strict";
// The page as a whole: tabs, search, keyboard, theme.

const Page = (() => {
  const panels = { model: Model, sparsity: Sparsity, code: Code, ...(DATA.run ? { run: Run } : {}) };
  const names = Object.keys(panels);
  let current = "model", started = new Set(["model"]);

  function open(name, focus = false) {
    current = name;
    for (const each of names) {
      const tab = byId(`tab-${each}`);
      tab.setAttribute("aria-selected", String(each === name));
      tab.tabIndex = each === name ? 0 : -1;
      byId(each).hidden = each !== name;
    }
    if (!started.has(name)) { started.add(name); panels[name].start(); }
    if (focus) byId(`tab-${name}`).focus();
    search(false);
  }

  function search(next) {
    const text = byId("search").value;
    const found = panels[current].search ? panels[current].search(text, next) : 0;
    byId("search").classList.toggle("missing", Boolean(text) && !found);
  }

  const themes = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme === "auto" ? themes.matches : document.documentElement.dataset.theme === "dark");

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("gossamer-theme", name); } catch { /* a page from disk may have no storage */ }
    emit("theme");
  }

  function key(event) {
    const typing = event.target.matches("input[type=search], textarea, select") || byId("keys").open;
    if (event.key === "Escape") {
      if (byId("keys").open) return;
      if (event.target === byId("search")) { byId("search").value = ""; search(false); byId("search").blur(); panels[current].focus(); }
      else if (current === "model" && Weight.isOpen()) Weight.close();
      else if (current === "code") Code.forget();
      return;
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { "/": () => byId("search").focus(), t: () => setTheme(isDark() ? "light" : "dark"), "?": () => byId("keys").showModal(),
      1: () => open("model", true), 2: () => open("sparsity", true), 3: () => open("code", true), 4: () => panels.run && open("run", true) }[event.key];
    if (act) { act(); event.preventDefault(); }
    else if (event.target.getAttribute("role") === "tab") {
      const to = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (to) open(names[(names.indexOf(current) + to + names.length) % names.length], true);
    } else if (event.target === document.body && event.key.startsWith("Arrow")) { panels[current].focus(); event.preventDefault(); }
  }

  function start() {
    let saved = null;
    try { saved = localStorage.getItem("gossamer-theme"); } catch { /* see above */ }
    if (saved) document.documentElement.dataset.theme = saved;
    themes.addEventListener("change", () => emit("theme"));
    byId("tab-run").hidden = !DATA.run;
    for (const name of names) byId(`tab-${name}`).addEventListener("click", () => open(name));
    byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
    byId("help").addEventListener("click", () => byId("keys").showModal());
    byId("search").addEventListener("input", () => search(false));
    byId("search").addEventListener("keydown", (event) => { if (event.key === "Enter") search(true); });
    document.addEventListener("keydown", key);
    on("panel", open);
    Model.start();
    Weight.start();
    Flow.start();
    const wanted = location.hash.slice(1);
    if (names.includes(wanted)) open(wanted);
  }

  return { start };
})();

Page.start();
