// Narrow screens show each row of a table as a block. Each cell then needs the name of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.table")) {
    const names = [...table.querySelectorAll("thead th")].map((each) => each.textContent);
    for (const row of table.querySelectorAll("tbody tr")) [...row.cells].forEach((cell, at) => { cell.dataset.column = names[at] ?? ""; });
  }
});
