/** One sample in a window of its own, with all that is known about it. */
class Viewer {
  constructor(gallery) {
    this.gallery = gallery;
    this.row = null;
    this.dialog = make("dialog", { "aria-label": "Sample" });
    this.dialog.addEventListener("close", () => this.onClose());
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
  }

  /** Shows a sample. asksClass: put the cursor where another class is typed. */
  open(row, asksClass = false) {
    const { gallery } = this;
    this.row = row;
    this.decision = make("p", { className: "decision", role: "status" });
    const close = make("button", { type: "button", className: "close", onclick: () => this.dialog.close() }, "Close");
    const picture = gallery.makePicture(row);
    picture.classList.add("large");
    const parts = [close, picture, this.makeFacts()];
    if (gallery.data.key) parts.push(gallery.makeButtons(row), this.makeChoice());
    this.dialog.replaceChildren(...parts, this.decision);
    this.tellDecision();
    if (!this.dialog.open) this.dialog.showModal();
    (asksClass && this.choice ? this.choice : close).focus();
  }

  makeFacts() {
    const { data } = this.gallery;
    const row = this.row;
    const whole = (label) => (label >= 0 ? visible(data.names[label] ?? label) : "–");
    const key = data.key?.[row];
    const suggests = this.gallery.suggests(row);
    const sure = (share) => (data.calibrated ? percent(share) : null);
    const facts = [
      ["given label", whole(data.given[row])],
      ["probability of it", sure(data.given_probability[row])],
      ["suggested label", suggests ? whole(data.suggested[row]) : null],
      ["probability of it", suggests ? sure(data.suggested_probability[row]) : null],
      ["true class", data.true ? whole(data.true[row]) : null],
      ["loss", data.loss[row]?.toFixed(3) ?? "–"],
      ["flagged", this.gallery.isFlagged(row) ? this.gallery.rankOf(row) : "no"],
      ["found", this.gallery.findingsOf(row).join(", ") || null],
      ["same image as", this.duplicatesOf(row) || null],
      ["state", this.gallery.stateOf(row).replace("_", " ")],
      ["source", data.source ? visible(data.sources[data.source[row]] ?? "–") : null],
      ["sample id", data.id[row]],
      ["key", key === undefined ? null : visible(key)],
      ["path", key === undefined || data.root === null ? null : visible(key.startsWith("/") ? key : `${data.root}/${key}`)],
    ];
    const known = facts.filter(([, value]) => value !== null);
    return make("dl", {}, ...known.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
  }

  /** Returns the keys and labels of the duplicates that the page has. */
  duplicatesOf(row) {
    const { data } = this.gallery;
    if (!(data.group?.[row] >= 0)) return "";
    const others = data.id.flatMap((id, other) => (other !== row && data.group[other] === data.group[row] ? [other] : []));
    const words = others.map((other) => `${visible(data.key?.[other] ?? data.id[other])} (${this.gallery.name(data.given[other])})`);
    return words.join(", ");
  }

  makeChoice() {
    const { data } = this.gallery;
    this.choice = make("input", { type: "text", placeholder: "Another class", list: "classes", "aria-label": "Another class" });
    const set = () => {
      const text = this.choice.value.trim().toLowerCase();
      const label = data.short.findIndex((name, place) => [name, data.names[place]].some((each) => visible(each).toLowerCase() === text));
      this.choice.setCustomValidity(label < 0 ? "No class has this name: choose one of the list" : "");
      if (label < 0) this.choice.reportValidity();
      else if (this.gallery.decisions.get(data.id[this.row]) !== label) this.gallery.decide(this.row, label);
    };
    this.choice.addEventListener("input", () => this.choice.setCustomValidity(""));
    this.choice.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); set(); } });
    return make("div", { className: "tools" }, this.choice, make("button", { type: "button", onclick: set }, "Set class"));
  }

  tellDecision() {
    if (this.row !== null) this.decision.textContent = this.gallery.wordsFor(this.row) || "not decided";
  }

  /** Shows the next or the previous sample of the gallery. */
  step(step) {
    const cards = this.gallery.cards();
    const place = cards.findIndex((card) => Number(card.dataset.row) === this.row);
    const next = cards[place + step];
    if (!next) return;
    this.gallery.setCurrent(next);
    this.open(Number(next.dataset.row));
  }

  onClose() {
    const row = this.row;
    this.row = null;
    document.querySelector(`article[data-row="${row}"]`)?.focus();
  }
}
