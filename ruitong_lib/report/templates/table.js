// Sorting, filters, opening rows, theme. Without this script the page shows every row, unsorted and closed.
"use strict";
const table = document.getElementById("table");
const rows = [...table.tBodies];
const form = document.getElementById("filters");
const shown = document.getElementById("shown");

function filter() {
  const wanted = new FormData(form);
  const words = wanted.get("search").toLowerCase().split(/\s+/).filter(Boolean);
  let n = 0;
  for (const body of rows) {
    const facets = [...wanted].every(([k, v]) => k === "search" || !v || body.dataset[k] === v);
    const text = words.every((w) => body.rows[0].textContent.toLowerCase().includes(w));
    body.hidden = !(facets && text);
    n += !body.hidden;
  }
  shown.textContent = n;
}
form.addEventListener("input", filter);
form.addEventListener("submit", (e) => e.preventDefault());

function sortBy(th) {
  const column = th.cellIndex;
  const up = th.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = (body) => body.rows[0].cells[column].dataset.value ?? body.rows[0].cells[column].textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === ""); // what is not measured stays last
    const numeric = th.dataset.numeric !== undefined;
    return (numeric ? x - y : x.localeCompare(y, document.documentElement.lang)) * (up ? 1 : -1);
  };
  for (const body of [...rows].sort(compare)) table.append(body);
}
for (const th of table.tHead.rows[0].cells) th.firstElementChild.addEventListener("click", () => sortBy(th));

function open(body, yes) {
  body.rows[1].hidden = !yes;
  body.querySelector(".open").setAttribute("aria-expanded", yes);
}
for (const body of rows) {
  const button = body.querySelector(".open");
  button.addEventListener("click", () => open(body, button.getAttribute("aria-expanded") !== "true"));
}
const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
if (target && rows.includes(target)) { open(target, true); target.scrollIntoView(); }

const theme = document.getElementById("theme");
function setTheme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
}
let kept = "";
try { kept = localStorage.getItem("theme") ?? ""; } catch { /* a page opened from a file may have no storage */ }
theme.value = kept;
setTheme(kept);
theme.addEventListener("change", () => {
  setTheme(theme.value);
  try { localStorage.setItem("theme", theme.value); } catch { /* as above */ }
});
