"use strict";

/** Creates an element. Properties are set as such, except data-* and aria-* attributes; children may be texts. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "list" || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Compares two cells: numbers by value, missing ones last, texts as people order them. */
function compareCells(a, b, descending) {
  const [x, y] = [a.dataset.value, b.dataset.value];
  if (x !== undefined && y !== undefined) return descending ? y - x : x - y;
  if (x !== undefined || y !== undefined) return x !== undefined ? -1 : 1;
  const order = a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  return descending ? -order : order;
}

/** Lets a table be sorted by its columns, searched by its first one, and opened if it is long. */
class WorkingTable {
  constructor(table) {
    this.body = table.tBodies[0];
    this.rows = [...this.body.rows];
    this.heads = [...table.tHead.rows[0].cells];
    const isNarrow = matchMedia("(max-width: 620px)").matches;  // a row is several lines high then
    this.most = (Number(table.dataset.shown) || Infinity) / (isNarrow ? 5 : 1);
    this.column = null;
    this.descending = false;
    this.wanted = "";
    const tools = make("div", { className: "tools" });
    if (table.dataset.search) tools.append(this.makeSearch(table.dataset.search));
    tools.append(this.makeChoice());
    table.before(tools);
    this.heads.forEach((head, column) => this.makeButton(head, column));
    this.more = make("button", { type: "button", className: "more", onclick: () => this.open() });
    table.after(this.more);
    this.show();
  }

  makeSearch(words) {
    const box = make("input", { type: "search", placeholder: words, "aria-label": words });
    box.addEventListener("input", () => { this.wanted = box.value.trim().toLowerCase(); this.show(); });
    return box;
  }

  makeButton(head, column) {
    const text = head.textContent;
    head.setAttribute("aria-sort", "none");
    head.replaceChildren(make("button", { type: "button", onclick: () => this.sortBy(column) }, text));
  }

  /** On a phone the heads are hidden, and this list takes their place. */
  makeChoice() {
    const names = this.heads.map((head, column) => make("option", { value: column }, `Sort by ${head.textContent}`));
    this.choice = make("select", { className: "narrow-only", "aria-label": "Sort by" }, ...names);
    this.choice.addEventListener("change", () => { this.column = null; this.sortBy(Number(this.choice.value)); });
    return this.choice;
  }

  sortBy(column) {
    const isText = this.heads[column].classList.contains("words");
    this.descending = this.column === column ? !this.descending : !isText;  // the largest numbers first
    this.column = column;
    this.choice.value = column;
    const direction = this.descending ? "descending" : "ascending";
    this.heads.forEach((head, place) => head.setAttribute("aria-sort", place === column ? direction : "none"));
    this.rows.sort((a, b) => compareCells(a.cells[column], b.cells[column], this.descending));
    this.show();
  }

  open() {
    this.most = Infinity;
    this.show();
  }

  show() {
    const text = (row) => `${row.cells[0].textContent} ${row.cells[0].title}`.toLowerCase();
    const found = this.rows.filter((row) => !this.wanted || text(row).includes(this.wanted));
    this.body.replaceChildren(...found.slice(0, this.most));
    for (const row of this.body.rows) row.classList.remove("rest");
    this.more.hidden = found.length <= this.most;
    this.more.textContent = `Show all ${found.length.toLocaleString("en")}`;
  }
}
