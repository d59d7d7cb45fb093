// Tooltips, series that can be hidden, tables that can be sorted and filtered, pictures that can be saved.
"use strict";
const tip = document.getElementById("tip");

for (const figure of document.querySelectorAll("figure")) {
  const series = (index) => figure.querySelectorAll(`g.series[data-series="${index}"]`);
  // The browser's own tooltips would come late and a second time.
  for (const title of figure.querySelectorAll("g.series title")) {
    title.parentElement.dataset.tip = title.textContent;
    title.remove();
  }
  figure.addEventListener("pointermove", (event) => {
    const text = event.target.dataset ? event.target.dataset.tip : undefined;
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  figure.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  for (const key of figure.querySelectorAll("g.key")) {
    const own = key.dataset.series;
    key.addEventListener("click", () => {
      const off = key.classList.toggle("off");
      series(own).forEach((group) => group.classList.toggle("hidden", off));
    });
    key.addEventListener("pointerenter", () => {
      figure.classList.add("some");
      series(own).forEach((group) => group.classList.add("this"));
    });
    key.addEventListener("pointerleave", () => {
      figure.classList.remove("some");
      series(own).forEach((group) => group.classList.remove("this"));
    });
  }
  const save = document.createElement("button");
  save.textContent = "Save SVG";
  save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([figure.querySelector("svg").outerHTML], { type: "image/svg+xml" }));
    link.download = figure.dataset.name + ".svg";
    link.click();
    URL.revokeObjectURL(link.href);
  });
  figure.append(save);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const cell = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const order = head.dataset.order === "1" ? -1 : 1;
    table.querySelectorAll("th").forEach((other) => delete other.dataset.order);
    head.dataset.order = order;
    const compare = (a, b) => {
      const [x, y] = [cell(a, column), cell(b, column)];
      return order * (head.classList.contains("number") ? Number(x) - Number(y) : x.localeCompare(y));
    };
    [...body.rows].sort(compare).forEach((row) => body.append(row));
  }));
  const filter = document.createElement("input");
  filter.placeholder = "Show rows with ...";
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    }
  });
  table.parentElement.before(filter);
}
