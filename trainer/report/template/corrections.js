/** The decision that a label is wrong and no class is right: the image is left out. */
const LEFT_OUT = -1;

/** What a person has decided on labels, by sample_id: a class, or LEFT_OUT. The browser keeps it for this run. */
class Decisions {
  constructor(store) {
    this.store = store;
    this.labels = new Map();
    this.isKept = true;
    try {
      for (const [id, label] of JSON.parse(localStorage.getItem(store) || "[]")) this.labels.set(id, label);
    } catch {
      this.isKept = false;  // some browsers refuse to store anything for a local file
    }
    addEventListener("beforeunload", (event) => { if (!this.isKept && this.labels.size) event.preventDefault(); });
  }

  get(id) {
    return this.labels.get(id);
  }

  /** Decides on a sample; undefined takes a decision back. */
  set(id, label) {
    if (label === undefined) this.labels.delete(id);
    else this.labels.set(id, label);
    try {
      localStorage.setItem(this.store, JSON.stringify([...this.labels]));
    } catch {
      this.isKept = false;
    }
  }
}

/** Quotes a cell of a CSV file, and keeps spreadsheets from running it as a formula (as shards/csv_file.py does). */
function csvCell(text) {
  const safe = /^'*[=+\-@\t\r\n]/.test(text) ? `'${text}` : text;
  return `"${safe.replaceAll('"', '""')}"`;
}

/** Returns the file that `labels.corrections` reads: all earlier decisions, changed and followed by the new ones. */
function correctionsCsv(data, decisions) {
  const labels = new Map(data.earlier.map(([key, label]) => [key, label ?? ""]));
  data.id.forEach((id, row) => {
    const label = decisions.get(id);
    if (label !== undefined) labels.set(data.key[row], label === LEFT_OUT ? "" : data.names[label]);
  });
  const lines = [...labels].map(([key, label]) => `${csvCell(key)},${csvCell(label)}`);
  return ["key,label", ...lines, ""].join("\n");
}

/** Saves a text as a file of the person who reads the page. */
function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
