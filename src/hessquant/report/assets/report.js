"use strict";
// Sort a table by the column whose heading is pressed; cells give their sort value as data-value.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const ascending = heading.getAttribute("aria-sort") !== "ascending";
    headings.forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      const numeric = Number(x) - Number(y);
      return Number.isNaN(numeric) ? x.localeCompare(y, "en", { numeric: true }) : numeric;
    };
    const rows = [...table.tBodies[0].rows].sort((a, b) => (ascending ? compare(a, b) : compare(b, a)));
    table.tBodies[0].append(...rows);
  }));
}
// Point at a kind in a legend to see it alone.
const show = (series) => document.querySelectorAll("svg [data-series]").forEach((mark) =>
  mark.classList.toggle("dim", series !== null && mark.dataset.series !== series));
for (const entry of document.querySelectorAll(".legend [data-series]")) {
  for (const event of ["mouseenter", "focus"]) entry.addEventListener(event, () => show(entry.dataset.series));
  for (const event of ["mouseleave", "blur"]) entry.addEventListener(event, () => show(null));
}
