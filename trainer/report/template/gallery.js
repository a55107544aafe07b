/** Makes control characters visible: they could hide or reorder what follows. */
function visible(text) {
  const escape = (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, escape);
}

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const KEPT = "selected";
const COLUMNS = [["flagged", "Flagged", 36], ["kept", "Kept", 18]];

/** The samples of the page: filters, cards in two columns, a view of one sample, and decisions on labels. */
class Gallery {
  constructor(data, host) {
    this.data = data;
    this.decisions = new Decisions(data.store);
    this.pixelated = new Set(data.pixelated);
    this.current = null;
    this.shown = { flagged: [], kept: [] };
    this.filters = this.makeFilters();
    this.count = make("p", { className: "note count", role: "status" });
    this.saving = this.makeSaving();
    this.columns = Object.fromEntries(COLUMNS.map(([name, title, step]) => [name, this.makeColumn(title, step)]));
    this.viewer = new Viewer(this);
    const parts = COLUMNS.map(([name]) => this.columns[name].box);
    host.replaceChildren(this.filters.box, this.count, make("div", { className: "columns" }, ...parts), this.saving);
    host.append(this.viewer.dialog);
    host.addEventListener("keydown", (event) => this.onKey(event));
    this.refresh();
  }

  name(label) {
    return visible(this.data.short[label] ?? label);
  }

  stateOf(row) {
    return this.data.states[this.data.state[row]];
  }

  makeFilters() {
    const { data } = this;
    const states = [...new Set(data.state)].map((state) => data.states[state]);
    const shows = [["", "Flagged and kept"], ["flagged", "Flagged"], ...states.map((name) => [name, name.replace("_", " ")])];
    const filters = {
      state: select("Show", shows),
      label: make("input", { type: "search", placeholder: "Class", list: "classes", "aria-label": "Class" }),
      source: select("Source", [["", "All sources"], ...data.sources.map((name, place) => [place, visible(name)])]),
      decided: select("Decisions", [["", "Decided or not"], ["no", "Not decided"], ["yes", "Decided"]]),
      key: make("input", { type: "search", placeholder: "Part of the key", "aria-label": "Part of the key" }),
      order: select("Order", [["loss", "Most suspicious first"], ["sure", "Surest suggestion first"], ["class", "By class"]]),
    };
    filters.source.hidden = !data.sources.length;
    filters.key.hidden = !data.key;
    const classes = make("datalist", { id: "classes" }, ...data.short.map((name) => make("option", { value: visible(name) })));
    for (const filter of Object.values(filters)) {
      filter.addEventListener(filter.tagName === "SELECT" ? "change" : "input", () => this.refresh());
    }
    return { ...filters, box: make("div", { className: "tools" }, ...Object.values(filters), classes) };
  }

  makeColumn(title, step) {
    const grid = make("div", { className: "suspects" });
    const heading = make("h3");
    const column = { title, step, grid, heading };
    column.more = make("button", { type: "button", className: "more", onclick: () => this.fill(column, column.rows.length) });
    column.box = make("div", { className: `column ${title.toLowerCase()}` }, heading, grid, column.more);
    return column;
  }

  makeSaving() {
    const save = () => download("corrections.csv", correctionsCsv(this.data, this.decisions));
    this.saveButton = make("button", { type: "button", className: "save", onclick: save }, "Download corrections.csv");
    this.saveNote = make("span");
    return make("div", { className: "saving", hidden: !this.data.key }, this.saveButton, this.saveNote);
  }

  /** Returns the classes that the filter asks for: the one of that name, or all whose names have the text in them. */
  wantedClasses() {
    const text = this.filters.label.value.trim().toLowerCase();
    if (!text) return null;
    const names = this.data.short.map((name) => visible(name).toLowerCase());
    const whole = names.indexOf(text);
    if (whole >= 0) return new Set([whole]);
    const found = (name, label) => name.includes(text) || this.data.names[label].toLowerCase().includes(text);
    return new Set(names.flatMap((name, label) => (found(name, label) ? [label] : [])));
  }

  isWanted(row, classes) {
    const { data, filters } = this;
    const state = this.stateOf(row);
    if (filters.state.value === "flagged" ? state === KEPT : filters.state.value && filters.state.value !== state) return false;
    if (classes && !classes.has(data.given[row]) && !classes.has(data.suggested[row])) return false;
    if (filters.source.value !== "" && data.source[row] !== Number(filters.source.value)) return false;
    const isDecided = this.decisions.get(data.id[row]) !== undefined;
    if (filters.decided.value && (filters.decided.value === "yes") !== isDecided) return false;
    return !filters.key.value || data.key[row].toLowerCase().includes(filters.key.value.toLowerCase());
  }

  /** Applies the filters and shows the first samples of each column. */
  refresh() {
    const { data } = this;
    const classes = this.wantedClasses();
    const rows = data.id.map((_, row) => row).filter((row) => this.isWanted(row, classes));
    const key = {
      loss: (row) => -data.loss[row],
      sure: (row) => -(data.suggested_probability[row] ?? -1),
      class: (row) => data.given[row],
    }[this.filters.order.value];
    rows.sort((a, b) => key(a) - key(b) || a - b);
    const { flagged, kept } = this.columns;
    flagged.rows = rows.filter((row) => this.stateOf(row) !== KEPT);
    kept.rows = rows.filter((row) => this.stateOf(row) === KEPT);
    for (const column of [flagged, kept]) {
      column.grid.replaceChildren();
      column.heading.textContent = `${column.title}: ${column.rows.length.toLocaleString("en")}`;
      this.fill(column, column.step);
    }
    flagged.box.hidden = this.filters.state.value === KEPT;
    kept.box.hidden = ![KEPT, ""].includes(this.filters.state.value);
    this.count.textContent = `${rows.length.toLocaleString("en")} of ${data.id.length.toLocaleString("en")} samples. `
      + "Click a picture for details. Keys: arrows move, R right, S as suggested, W wrong, O other class, U undo, Enter details.";
    this.setCurrent(null);
    this.tellSaving();
  }

  fill(column, most) {
    const from = column.grid.children.length;
    const until = most > column.step ? from + 4 * column.step : most;
    column.grid.append(...column.rows.slice(from, until).map((row) => this.makeCard(row)));
    column.more.hidden = column.grid.children.length >= column.rows.length;
    column.more.textContent = `Show more (${(column.rows.length - column.grid.children.length).toLocaleString("en")})`;
  }

  makePicture(row) {
    const picture = this.data.picture[row];
    if (!picture) return make("div", { className: "blank" });
    const isPixelated = this.pixelated.has(this.data.id[row]);
    return make("img", {
      src: `data:image/webp;base64,${picture}`, alt: `sample ${this.data.id[row]}`, className: isPixelated ? "pixelated" : "",
    });
  }

  makeCard(row) {
    const { data } = this;
    const suggests = data.suggested[row] >= 0 && data.suggested[row] !== data.given[row];
    const look = make("button", { type: "button", className: "look", onclick: () => this.viewer.open(row) }, this.makePicture(row));
    look.setAttribute("aria-label", `Details of sample ${data.id[row]}`);
    const labels = this.name(data.given[row]) + (suggests ? ` → ${this.name(data.suggested[row])}` : "");
    const sure = suggests ? data.suggested_probability[row] : data.given_probability[row];
    const card = make(
      "article", { className: "card suspect", tabIndex: -1, "data-row": row }, look,
      make("div", { className: "labels" }, labels), ...this.makeTruth(row),
      make("small", {}, `${percent(sure)} sure · loss ${data.loss[row].toFixed(1)}`),
    );
    if (data.key) card.append(this.makeButtons(row));
    card.addEventListener("focusin", () => this.setCurrent(card));
    this.tellDecision(card);
    return card;
  }

  makeTruth(row) {
    const truth = this.data.true?.[row];
    if (truth === undefined || truth === null || truth < 0) return [];
    if (this.stateOf(row) === KEPT && truth === this.data.given[row]) return [];
    if (truth === this.data.given[row]) return [make("div", { className: "bad" }, "✗ the label is correct")];
    const mark = truth === this.data.suggested[row] && this.stateOf(row) !== KEPT ? ["good", "✓"] : ["bad", "✗"];
    return [make("div", { className: mark[0] }, `${mark[1]} true class: ${this.name(truth)}`)];
  }

  makeButtons(row) {
    const { given, suggested } = this.data;
    const button = (text, title, label) => {
      const element = make("button", { type: "button", title, onclick: () => this.decide(row, label) }, text);
      element.setAttribute("aria-label", title);
      return element;
    };
    const buttons = [button("✓", `The label is right: ${this.name(given[row])}`, given[row])];
    if (suggested[row] >= 0 && suggested[row] !== given[row]) {
      buttons.push(button("→", `It is ${this.name(suggested[row])}`, suggested[row]));
    }
    buttons.push(button("✗", "The label is wrong, and no class is right: leave the image out", LEFT_OUT));
    const other = make("button", { type: "button", title: "Another class", onclick: () => this.viewer.open(row, true) }, "…");
    other.setAttribute("aria-label", "Another class");
    return make("div", { className: "decide" }, ...buttons, other);
  }

  /** Decides on a sample; the same decision again takes it back. */
  decide(row, label) {
    const id = this.data.id[row];
    this.decisions.set(id, this.decisions.get(id) === label ? undefined : label);
    for (const card of document.querySelectorAll(`[data-row="${row}"]`)) this.tellDecision(card);
    this.tellSaving();
    this.viewer.tellDecision();
  }

  wordsFor(row) {
    const label = this.decisions.get(this.data.id[row]);
    if (label === undefined) return "";
    if (label === LEFT_OUT) return "✗ wrong, left out";
    return label === this.data.given[row] ? "✓ right" : `→ ${this.name(label)}`;
  }

  tellDecision(card) {
    card.querySelector(".decision")?.remove();
    const words = this.wordsFor(Number(card.dataset.row));
    card.classList.toggle("decided", words !== "");
    if (words) card.append(make("div", { className: "decision" }, words));
  }

  tellSaving() {
    const { earlier, earlier_left_out: more } = this.data;
    const count = this.decisions.labels.size;
    this.saveButton.disabled = !count;
    const words = [`${count.toLocaleString("en")} ${count === 1 ? "decision" : "decisions"}`];
    if (earlier.length) words.push(`and ${earlier.length.toLocaleString("en")} of earlier corrections`);
    if (more) words.push(`; ${more.toLocaleString("en")} more earlier ones are only in labels_review.csv: add its rows with checked = true`);
    if (!this.decisions.isKept) words.push("; this browser does not keep them: download them before you leave");
    this.saveNote.textContent = `${words.join(" ")}. Run again with labels.corrections=corrections.csv.`.replaceAll(" ;", ";");
  }

  setCurrent(card) {
    this.current?.classList.remove("current");
    this.current = card;
    card?.classList.add("current");
    const cards = this.cards();
    cards.forEach((each) => { each.tabIndex = -1; });
    const first = card ?? cards[0];
    if (first) first.tabIndex = 0;  // the tab key enters the gallery at this card
  }

  cards() {
    return COLUMNS.flatMap(([name]) => (this.columns[name].box.hidden ? [] : [...this.columns[name].grid.children]));
  }

  /** Moves to the card `step` places on, or to the one above or below; loads more cards at the end of a column. */
  move(step, isVertical = false) {
    const card = this.current;
    const column = Object.values(this.columns).find((each) => each.grid.contains(card));
    if (isVertical) step *= [...column.grid.children].filter((each) => each.offsetTop === card.offsetTop).length;
    if (card === column.grid.lastElementChild && step > 0 && !column.more.hidden) column.more.click();
    const cards = this.cards();
    const next = cards[cards.indexOf(card) + step];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
    const row = this.viewer.row ?? (this.current ? Number(this.current.dataset.row) : null);
    if (row === null) return;
    const isOpen = this.viewer.row !== null;
    const { given, suggested, key } = this.data;
    const go = (step, isVertical) => (isOpen ? this.viewer.step(step) : this.move(step, isVertical));
    const decide = (label) => {
      if (!key || label < LEFT_OUT) return;
      if (this.decisions.get(this.data.id[row]) !== label) this.decide(row, label);
      go(1);
    };
    const actions = {
      ArrowRight: () => go(1), ArrowLeft: () => go(-1), ArrowDown: () => go(1, true), ArrowUp: () => go(-1, true),
      r: () => decide(given[row]), s: () => { if (suggested[row] >= 0) decide(suggested[row]); }, w: () => decide(LEFT_OUT),
      u: () => { if (this.decisions.get(this.data.id[row]) !== undefined) this.decide(row, this.decisions.get(this.data.id[row])); },
      o: () => this.viewer.open(row, true),
    };
    if (!isOpen && event.target === this.current) actions.Enter = () => this.viewer.open(row);
    const action = actions[event.key] ?? actions[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }
}

function select(label, choices) {
  return make("select", { "aria-label": label }, ...choices.map(([value, text]) => make("option", { value }, text)));
}
