"""WebVision and ILSVRC12 val from their real lists, thinned to a few hundred rows with real JPEGs.

LISTS/{synsets.txt, train_filelist_classes0-9.txt or train_filelist_{google,flickr}.txt, val_filelist.txt,
       ILSVRC2012_val_label.txt}
JPEGS/*.JPEG or *.jpg, any number: class k is given its own share of them, so that something can be learned
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

CLASSES = 10
_BROKEN = (b"<html>gone</html>", b"", b"GIF89a" + bytes(40))


def thinned_webvision(lists: Path, jpegs: Path, root: Path, train: int, val: int, broken: int = 2) -> Path:
    """ROOT with info/, google/, flickr/ and val_images_256/; `broken` of the Google rows hold no image."""
    info = root / "info"
    info.mkdir(parents=True)
    (info / "synsets.txt").write_bytes((lists / "synsets.txt").read_bytes())
    pictures = _Pictures(jpegs)
    listed = [line for file in sorted(lists.glob("train_filelist_*.txt")) for line in _lines(file)]
    for part in ("google", "flickr"):
        rows = _thinned([line for line in listed if line.startswith(part + "/")], train)
        (info / f"train_filelist_{part}.txt").write_text("".join(line + "\n" for line in rows))
        for number, line in enumerate(rows):
            path, label = line.split()
            spoilt = part == "google" and number % (train // broken) == 7
            _write(root / path, _BROKEN[number % len(_BROKEN)] if spoilt else pictures.of(int(label)))
    rows = _thinned(_lines(lists / "val_filelist.txt"), val)
    (info / "val_filelist.txt").write_text("".join(line + "\n" for line in rows))
    for line in rows:
        name, label = line.split()
        _write(root / "val_images_256" / name, pictures.of(int(label)))
    return root


def thinned_ilsvrc12(lists: Path, jpegs: Path, root: Path, val: int) -> Path:
    """ROOT/ILSVRC2012_val_*.JPEG with the list beside them."""
    labels = {line.split()[0]: label for label, line in enumerate(_lines(lists / "synsets.txt"))}
    listed = [(line, labels[line.split()[2]]) for line in _lines(lists / "ILSVRC2012_val_label.txt")]
    rows = _thinned([f"{line} {label}" for line, label in listed], val)
    root.mkdir(parents=True)
    (root / "ILSVRC2012_val_label.txt").write_text("".join(row.rpartition(" ")[0] + "\n" for row in rows))
    pictures = _Pictures(jpegs)
    for row in rows:
        _write(root / row.split()[0], pictures.of(int(row.split()[-1])))
    return root


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def _thinned(lines: Sequence[str], count: int) -> list[str]:
    """About `count` lines of the first classes, as many of each, and a few of others: those must be left out later.

    The last word of a line is its label; the order of the list is kept.
    """
    by_class: dict[int, list[str]] = {}
    for line in lines:
        by_class.setdefault(int(line.split()[-1]), []).append(line)
    each = -(-count // CLASSES)
    kept: set[str] = set()
    for label, of_class in by_class.items():
        few = each if label < CLASSES else int(label % 100 == 0)
        kept.update(of_class[:: max(1, len(of_class) // max(few, 1))][:few])
    return [line for line in lines if line in kept]


class _Pictures:
    def __init__(self, folder: Path) -> None:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
        share = len(files) // CLASSES
        self._of_class = [self._endless(files[label * share : (label + 1) * share]) for label in range(CLASSES)]

    def of(self, label: int) -> bytes:
        return next(self._of_class[label % CLASSES])

    @staticmethod
    def _endless(files: Sequence[Path]) -> Iterator[bytes]:
        while True:
            for file in files:
                yield file.read_bytes()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
