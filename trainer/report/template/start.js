for (const table of document.querySelectorAll("table.sortable")) new WorkingTable(table);
const galleryData = document.getElementById("gallery-data");
if (galleryData) new Gallery(JSON.parse(galleryData.textContent), document.getElementById("gallery"));
document.documentElement.dataset.ready = "true";
