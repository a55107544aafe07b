/** Makes control characters visible: they could hide or reorder what follows. */
function visible(text) {
  const escape = (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, escape);
}

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const counted = (number) => number.toLocaleString("en");
const KEPT = "selected";
const COLUMNS = [["flagged", "Flagged", 36], ["kept", "Kept", 18]];

/** The samples of the page: filters, cards in two columns, a view of one sample, and decisions on labels. */
class Gallery {
  constructor(data, host) {
    this.data = data;
    this.decisions = new Decisions(data.store);
    this.pixelated = new Set(data.pixelated);
    this.found = new Map(data.found.map((each) => [each.name, { ...each, places: new Map(each.rows.map((row, place) => [row, place])) }]));
    this.keptRows = data.id.filter((_, row) => row >= data.flagged && this.stateOf(row) === KEPT).length;
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
    this.followLinks();
    this.refresh();
  }

  name(label) {
    return visible(this.data.short[label] ?? label);
  }

  stateOf(row) {
    return this.data.states[this.data.state[row]];
  }

  isFlagged(row) {
    return row < this.data.flagged;
  }

  /** Returns what was found besides a wrong label; of a conflicting duplicate, only that. */
  findingsOf(row) {
    const names = [...this.found.keys()].filter((name) => this.found.get(name).places.has(row));
    return names.filter((name) => name !== "duplicate" || !names.includes("conflict")).map((name) => this.found.get(name).title);
  }

  /** Returns how suspicious a sample is: in per cent only where the probabilities are calibrated. */
  doubtOf(row) {
    const { data } = this;
    if (data.calibrated) {
      const sure = this.suggests(row) ? data.suggested_probability[row] : data.given_probability[row];
      return sure === null ? "" : `${percent(sure)} sure`;
    }
    if (this.isFlagged(row)) return this.rankOf(row);
    return data.loss[row] === null ? "" : `loss ${data.loss[row].toFixed(1)}`;
  }

  rankOf(row) {
    return `rank ${counted(this.data.rank[row])} of ${counted(this.data.totals.flagged)}`;
  }

  suggests(row) {
    return this.data.suggested[row] >= 0 && this.data.suggested[row] !== this.data.given[row];
  }

  makeFilters() {
    const { data } = this;
    const states = [...new Set(data.state)].map((state) => data.states[state]);
    const capital = (text) => text[0].toUpperCase() + text.slice(1).replace("_", " ");
    const shows = [
      ["", "Flagged and kept"], ["flagged", "Flagged"],
      ...data.found.map(({ name, title, total }) => [name, `${capital(title)} (${counted(total)})`]),
      ...states.map((name) => [name, capital(name)]),
    ];
    const filters = {
      show: select("Show", shows),
      label: make("input", { type: "search", placeholder: "Class, or A → B", list: "classes", "aria-label": "Class" }),
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

  /** Sets all filters: what to show, and a pair of classes if there is one. */
  showOnly({ show, given, suggested }) {
    const pair = given === undefined ? "" : `${this.name(given)} → ${this.name(suggested)}`;
    const values = { show, label: pair, source: "", decided: "", key: "", order: "loss" };
    for (const [name, value] of Object.entries(values)) this.filters[name].value = value;
    this.refresh();
  }

  /** Lets the links of other sections set the filters, and their pictures open a sample. */
  followLinks() {
    for (const link of document.querySelectorAll("a[data-show]")) {
      link.addEventListener("click", () => this.showOnly(link.dataset));
    }
    for (const link of document.querySelectorAll("a[data-sample]")) {
      const row = this.data.id.indexOf(Number(link.dataset.sample));
      if (row < 0) continue;
      link.addEventListener("click", (event) => { event.preventDefault(); this.viewer.open(row); });
    }
  }

  /** Returns the classes with this name, or all whose names have the text in them; null without a text. */
  classesNamed(text) {
    if (!text) return null;
    const names = this.data.short.map((name) => visible(name).toLowerCase());
    const whole = names.indexOf(text);
    if (whole >= 0) return new Set([whole]);
    const found = (name, label) => name.includes(text) || this.data.names[label].toLowerCase().includes(text);
    return new Set(names.flatMap((name, label) => (found(name, label) ? [label] : [])));
  }

  /** Returns whether a sample is of the wanted class, given or suggested, or of the pair `given → suggested`. */
  makeClassFilter() {
    const { given, suggested, short } = this.data;
    const text = this.filters.label.value.trim().toLowerCase();
    const sides = text.split(/→|->/).map((side) => side.trim());
    if (sides.length === 2 && !short.some((name) => visible(name).toLowerCase() === text)) {
      const [from, to] = sides.map((side) => this.classesNamed(side));
      return (row) => (!from || from.has(given[row])) && (!to || to.has(suggested[row]));
    }
    const classes = this.classesNamed(text);
    return (row) => !classes || classes.has(given[row]) || classes.has(suggested[row]);
  }

  isShown(row) {
    const show = this.filters.show.value;
    if (show === "") return this.isFlagged(row) || this.stateOf(row) === KEPT;
    if (show === "flagged") return this.isFlagged(row);
    return this.found.get(show)?.places.has(row) ?? this.stateOf(row) === show;
  }

  isWanted(row, isOfClass) {
    const { data, filters } = this;
    if (!this.isShown(row) || !isOfClass(row)) return false;
    if (filters.source.value !== "" && data.source[row] !== Number(filters.source.value)) return false;
    const isDecided = this.decisions.get(data.id[row]) !== undefined;
    if (filters.decided.value && (filters.decided.value === "yes") !== isDecided) return false;
    return !filters.key.value || data.key[row].toLowerCase().includes(filters.key.value.toLowerCase());
  }

  /** Applies the filters and shows the first samples of each column. */
  refresh() {
    const { data } = this;
    const show = this.filters.show.value;
    const finding = this.found.get(show);
    const isOfClass = this.makeClassFilter();
    const rows = data.id.map((_, row) => row).filter((row) => this.isWanted(row, isOfClass));
    const key = {
      loss: (row) => (finding ? finding.places.get(row) : row),
      sure: (row) => -(data.suggested_probability[row] ?? -1),
      class: (row) => data.given[row],
    }[this.filters.order.value];
    rows.sort((a, b) => key(a) - key(b) || a - b);
    const isRight = (row) => show === KEPT || (show === "" && !this.isFlagged(row));
    const { flagged, kept } = this.columns;
    flagged.rows = rows.filter((row) => !isRight(row));
    kept.rows = rows.filter(isRight);
    const isPlain = ["", "flagged", KEPT].includes(show);
    flagged.title = isPlain ? "Flagged" : this.filters.show.selectedOptions[0].text.replace(/ \([\d,]+\)$/, "");
    for (const column of [flagged, kept]) {
      column.grid.replaceChildren();
      column.heading.textContent = `${column.title}: ${counted(column.rows.length)}`;
      this.fill(column, column.step);
    }
    flagged.box.hidden = show === KEPT;
    kept.box.hidden = ![KEPT, ""].includes(show);
    this.count.textContent = `${counted(rows.length)} of ${counted(data.id.length)} samples. ${this.wordsOnRest(show)}`
      + "Click a picture for details. Keys: arrows move, R right, S as suggested, W wrong, O other class, U undo, Enter details.";
    this.setCurrent(null);
    this.tellSaving();
  }

  /** Says how many samples of a kind the page has, if not all. */
  wordsOnRest(show) {
    const { flagged, totals } = this.data;
    const finding = this.found.get(show);
    const kinds = finding ? [[finding.rows.length, finding.total, `“${finding.title}”`]] : [];
    if (["", "flagged"].includes(show)) kinds.push([flagged, totals.flagged, "flagged"]);
    if (["", KEPT].includes(show)) kinds.push([this.keptRows, totals.kept, "kept"]);
    const cut = kinds.filter(([here, all]) => here < all).map(([here, all, kind]) => `${counted(here)} of ${counted(all)} ${kind}`);
    return cut.length ? `This page has ${cut.join(" and ")} samples; labels_review.csv lists all. ` : "";
  }

  fill(column, most) {
    const from = column.grid.children.length;
    const until = most > column.step ? from + 4 * column.step : most;
    column.grid.append(...column.rows.slice(from, until).map((row) => this.makeCard(row)));
    column.more.hidden = column.grid.children.length >= column.rows.length;
    column.more.textContent = `Show more (${counted(column.rows.length - column.grid.children.length)})`;
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
    const look = make("button", { type: "button", className: "look", onclick: () => this.viewer.open(row) }, this.makePicture(row));
    look.setAttribute("aria-label", `Details of sample ${data.id[row]}`);
    const labels = this.name(data.given[row]) + (this.suggests(row) ? ` → ${this.name(data.suggested[row])}` : "");
    const card = make(
      "article", { className: "card suspect", tabIndex: -1, "data-row": row }, look, ...this.makeBadges(row),
      make("div", { className: "labels" }, labels), ...this.makeTruth(row),
      make("small", {}, this.doubtOf(row)),
    );
    if (data.key) card.append(this.makeButtons(row));
    card.addEventListener("focusin", () => this.setCurrent(card));
    this.tellDecision(card);
    return card;
  }

  makeBadges(row) {
    const titles = this.findingsOf(row);
    return titles.length ? [make("div", { className: "badges" }, ...titles.map((title) => make("span", {}, title)))] : [];
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
    if (this.suggests(row)) {
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
    const words = [`${counted(count)} ${count === 1 ? "decision" : "decisions"}`];
    if (earlier.length) words.push(`and ${counted(earlier.length)} of earlier corrections`);
    if (more) words.push(`; ${counted(more)} more earlier ones are only in labels_review.csv: add its rows with checked = true`);
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
