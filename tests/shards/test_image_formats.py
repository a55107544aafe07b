"""Formats by their first bytes, and the words for unusable images."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.image_check import VERDICTS
from shards.image_formats import (
    DECODED,
    REASONS,
    SUFFIXES,
    explain_ignored,
    explain_misnamed,
    explain_verdict,
    recognise_format,
)
from tests.support.pictures import picture

FORMATS = {"JPEG": "JPEG", "PNG": "PNG", "WEBP": "WebP", "GIF": "GIF", "BMP": "BMP", "TIFF": "TIFF"}


def test_every_verdict_has_words():
    assert set(REASONS) == set(VERDICTS) - {"ok"}


@pytest.mark.parametrize(("kind", "name"), FORMATS.items())
def test_decoded_formats_are_recognised_whatever_their_name_says(kind, name):
    data = picture(kind=kind)
    assert recognise_format(data) == name
    assert explain_misnamed(data, DECODED[name]) == ""
    other = "png" if name == "JPEG" else "jpg"
    assert explain_misnamed(data, other) == f"{name} bytes in a .{other}"
    assert explain_misnamed(data, "") == ""  # the name says nothing


@pytest.mark.parametrize(
    ("verdict", "data", "suffix", "words"),
    [
        ("not_an_image", b"", "jpg", "empty file"),
        ("not_an_image", b"nothing known", "jpg", "not an image"),
        ("not_an_image", b"  <!DOCTYPE html><html>", "jpg", "HTML bytes in a .jpg, not an image"),
        ("not_an_image", b"%PDF-1.4", "", "PDF file, not an image"),
        ("unsupported", b"\0\0\0\x20ftypavif", "jpg", "AVIF bytes in a .jpg, which is not supported: convert"),
        ("unsupported", picture(), "png", "animated PNG, which is not supported"),
        ("truncated", picture(), "png", "damaged or truncated PNG image"),
        ("truncated", picture(kind="WEBP"), "jpg", "WebP bytes in a .jpg, damaged or truncated"),
        ("oversized", picture(), "png", "larger than 64 MiB or 50 megapixels"),
    ],
)
def test_words_for_verdicts(verdict, data, suffix, words):
    assert explain_verdict(verdict, data, suffix).startswith(words)


@given(st.sampled_from(sorted(REASONS)), st.binary(max_size=40), st.sampled_from(["", *SUFFIXES.values()]))
def test_any_bytes_have_words(verdict, data, suffix):
    assert explain_verdict(verdict, data, suffix)


def test_words_for_ignored_files():
    assert explain_ignored("a/.DS_Store") == "hidden file"
    assert explain_ignored("a/photo.HEIC").startswith("HEIC format, which is not supported")
    assert explain_ignored("notes.txt") == "not an image by its suffix (.txt)"
    assert explain_ignored("a.b/README") == "not an image: its name has no suffix"
