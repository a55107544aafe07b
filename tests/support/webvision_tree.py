"""Small trees in the layout of WebVision 1.0 and ILSVRC12 val, of real JPEG files, some deliberately broken.

    root = webvision_tree(tmp_path / "webvision", google=20, flickr=10, val=10, classes=5)
    tars = as_tars(root, tmp_path / "tars")            # the same rows, as the official downloads hold them
    ilsvrc12_tree(tmp_path / "ilsvrc12", count=10, classes=5, form="folders")   # or "flat", "tar"

Everything is a function of the arguments: the same call writes the same bytes. The images are crops of the two
photographs that come with scikit-learn; those of one class are taken near one place, so that a network can learn it.
"""

import io
import tarfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

# Lines of the real synsets.txt, sorted by wnid; "crane" and "maillot" are two classes each.
SYNSETS = (
    "n01440764 tench, Tinca tinca",
    "n01443537 goldfish, Carassius auratus",
    "n01484850 great white shark, white shark, man-eater, man-eating shark, Carcharodon carcharias",
    "n01491361 tiger shark, Galeocerdo cuvieri",
    "n01494475 hammerhead, hammerhead shark",
    "n02012849 crane",
    "n03126707 crane",
    "n03710637 maillot",
    "n03710721 maillot, tank suit",
    "n15075141 toilet tissue, toilet paper, bathroom tissue",
)
DECODABLE = ("progressive", "gray", "cmyk", "exif_rotated", "png", "png16", "gif")
REJECTED = ("truncated", "html", "avif", "empty", "header_only")
KINDS = ("jpeg", *DECODABLE, *REJECTED)

# apart by part, so that no picture is made twice
_FIRST_NUMBERS = {"google": 0, "flickr": 1_000_000, "val": 2_000_000, "ilsvrc12": 3_000_000}
_Plants = Mapping[tuple[str, int], str]


def synset_lines(classes: int) -> list[str]:
    """The lines of synsets.txt; beyond the ten above, made-up ones that sort after them."""
    return [SYNSETS[i] if i < len(SYNSETS) else f"n9{i:07d} made-up class {i}" for i in range(classes)]


def webvision_tree(
    root: Path,
    google: int = 20,
    flickr: int = 10,
    val: int = 10,
    classes: int = 10,
    plant: _Plants | None = None,
    side: int = 40,
    noise: float = 0.0,
) -> Path:
    """ROOT/{google,flickr}/qNNNN/*.jpg, ROOT/val_images_256/*.jpg and ROOT/info/*.txt; returns ROOT.

    google, flickr, val: the number of images of each; their labels go up from 0 as in the real lists.
    plant: {("google", 3): "truncated", ...}, the kind (one of KINDS) of single images by part and row in its list.
    side: the shorter side of an image is `side` pixels or a little more.
    noise: the share of training images that show another class than their label says.
    """
    kinds, info = dict(plant or {}), root / "info"
    info.mkdir(parents=True, exist_ok=True)
    _write_lines(info / "synsets.txt", synset_lines(classes))
    _write_lines(info / "queries_synsets_map.txt", (f"{q + 1} {q // 2 + 1}" for q in range(2 * classes)))
    for part, count in (("google", google), ("flickr", flickr), ("val", val)):
        lines = []
        for row, label in enumerate(_labels(count, classes)):
            path = _val_name(row) if part == "val" else _train_path(part, row, label)
            shown = label
            if part != "val" and np.random.default_rng([row, len(part), 7]).random() < noise:
                shown = (label + 1 + row) % classes
            data = picture_of(shown, row + _FIRST_NUMBERS[part], side, kinds.pop((part, row), "jpeg"))
            _write_file(root / ("val_images_256" if part == "val" else "") / path, data)
            lines.append(f"{path} {label}")
        _write_lines(info / (f"train_filelist_{part}.txt" if part != "val" else "val_filelist.txt"), lines)
    assert not kinds, f"no such rows: {sorted(kinds)}"
    return root


def as_tars(root: Path, out: Path, prefix: str = "", info: str = "tar", style: int = tarfile.GNU_FORMAT) -> Path:
    """OUT with the four tars of the official downloads, made of the tree `root`; returns OUT.

    prefix: put before every member's name, such as "./" or "resized/".
    info: "tar" for info.tar, "folder" for an extracted OUT/info.
    """
    out.mkdir(parents=True, exist_ok=True)
    for folder, name in (
        ("google", "google_resized_256.tar"),
        ("flickr", "flickr_resized_256.tar"),
        ("val_images_256", "val_images_256.tar"),
    ):
        if (root / folder).is_dir():
            tar_of(root / folder, out / name, f"{prefix}{folder}", style)
    if info == "tar":
        tar_of(root / "info", out / "info.tar", f"{prefix}info", style)
    else:
        for file in sorted((root / "info").iterdir()):
            _write_file(out / "info" / file.name, file.read_bytes())
    return out


def ilsvrc12_tree(
    root: Path,
    count: int = 10,
    classes: int = 10,
    form: str = "folders",
    synsets: bool = True,
    plant: _Plants | None = None,
    side: int = 40,
) -> Path:
    """The validation set of ILSVRC12 with `count` images of the classes of `synset_lines`; returns ROOT.

    form: "folders": ROOT/val/<wnid>/NAME.JPEG; "flat": ROOT/val/NAME.JPEG and ROOT/ILSVRC2012_val_label.txt;
        "tar": ROOT/ILSVRC2012_img_val.tar and that list.
    synsets: whether ROOT/synsets.txt is there. Without it the classes are the 1000 real ones, and the made-up wnids
        of more than ten classes are not among them.
    plant: {("val", 3): "truncated", ...} as in `webvision_tree`.
    """
    kinds, lines, images = dict(plant or {}), [], {}
    wnids = [line.split()[0] for line in synset_lines(classes)]
    labels = np.random.default_rng(12).permutation(_labels(count, classes))  # in no order, as in the real list
    for row, label in enumerate(labels.tolist()):
        name = f"ILSVRC2012_val_{row + 1:08d}.JPEG"
        images[name] = picture_of(label, row + _FIRST_NUMBERS["ilsvrc12"], side, kinds.pop(("val", row), "jpeg"))
        lines.append(f"{name} {900 - label} {wnids[label]}")  # the number is the devkit's: unrelated to the label
        if form == "folders":
            _write_file(root / "val" / wnids[label] / name, images[name])
        elif form == "flat":
            _write_file(root / "val" / name, images[name])
    root.mkdir(parents=True, exist_ok=True)
    if form == "tar":
        write_tar(root / "ILSVRC2012_img_val.tar", images.items())
    if form != "folders":
        _write_lines(root / "ILSVRC2012_val_label.txt", lines)
    if synsets:
        _write_lines(root / "synsets.txt", synset_lines(classes))
    assert not kinds, f"no such rows: {sorted(kinds)}"
    return root


def picture_of(label: int, number: int, side: int = 40, kind: str = "jpeg") -> bytes:
    """A file of the given kind: a crop around the place of class `label`, varied by `number`."""
    rng = np.random.default_rng([label, number])
    photograph = _photographs()[label % 2]
    height, width = (side + int(rng.integers(0, 1 + side // 4)) for _ in range(2))
    place = np.random.default_rng([label, 11]).random(2) * (np.array(photograph.shape[:2]) - 2 * side - 16)
    top, left = (place + rng.integers(0, 16, 2)).astype(int).clip(0)
    return _file(np.ascontiguousarray(photograph[top : top + height, left : left + width]), kind)


def tar_of(folder: Path, path: Path, prefix: str, style: int = tarfile.GNU_FORMAT) -> Path:
    """`path`, a tar of all files below `folder`, sorted, their names under `prefix`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return write_tar(path, ((f"{prefix}/{f.relative_to(folder).as_posix()}", f.read_bytes()) for f in files), style)


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], style: int = tarfile.GNU_FORMAT) -> Path:
    """`path`, a plain tar of (name, content) in the given order."""
    with tarfile.open(path, "w", format=style) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def _labels(count: int, classes: int) -> list[int]:
    return [row * classes // count for row in range(count)]


def _train_path(part: str, row: int, label: int) -> str:
    """Two queries a class, every third base name repeated under both, some names with a leading `-`: all real."""
    query = 2 * label + 1 + row % 2
    name = f"same{row // 2}" if row % 6 < 2 else f"-{part[0]}O_{row:05d}" if row % 6 == 2 else f"{part[0]}{row:05d}"
    return f"{part}/q{query:04d}/{name}.jpg"


def _val_name(row: int) -> str:
    return f"val{row + 1:06d}.jpg"


@cache
def _photographs() -> tuple[np.ndarray, np.ndarray]:
    """Two photographs, uint8 [427, 640, 3]."""
    from sklearn.datasets import load_sample_images

    china, flower = load_sample_images().images
    return china, flower


def _file(pixels: np.ndarray, kind: str) -> bytes:
    image = Image.fromarray(pixels)
    if kind == "jpeg":
        return _saved(image, "JPEG")
    if kind == "progressive":
        return _saved(image, "JPEG", progressive=True)
    if kind == "gray":
        return _saved(image.convert("L"), "JPEG")
    if kind == "cmyk":
        return _saved(image.convert("CMYK"), "JPEG")
    if kind == "exif_rotated":
        exif = Image.Exif()
        exif[0x0112] = 6
        return _saved(image, "JPEG", exif=exif)
    if kind == "png":
        return _saved(image, "PNG")
    if kind == "png16":
        return _saved(Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257), "PNG")
    if kind == "gif":
        return _saved(image, "GIF")
    if kind == "avif":
        return b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miaf" + bytes(100)
    if kind == "html":
        return b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body>gone</body></html>\n"
    jpeg = _saved(image, "JPEG")
    return {"truncated": jpeg[: len(jpeg) // 2], "empty": b"", "header_only": jpeg[:20]}[kind]


def _saved(image: Image.Image, file_format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=file_format, **options)
    return stream.getvalue()


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    _write_file(path, "".join(f"{line}\n" for line in lines).encode())
